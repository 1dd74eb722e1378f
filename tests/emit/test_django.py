"""A real Django: its connection, its transactions, its migrations."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import django
import pytest
from django.conf import settings
from django.db import connections, transaction
from django.db.migrations import Migration
from django.db.migrations.state import ProjectState

from mailboat import EmitRefused, emit
from mailboat.django import MigrateOutbox
from mailboat_devservers.postgres import Database


@pytest.fixture(scope="module", autouse=True)
def configured() -> None:
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}, USE_TZ=True)
    django.setup()


@pytest.fixture
def alias(database: Database) -> Iterator[str]:
    """Alias of a database without an outbox."""
    place = urlsplit(database.url)
    connections.settings["shop"] = connections.configure_settings(
        {
            "default": connections.settings["default"],
            "shop": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": database.name,
                "USER": place.username,
                "HOST": place.hostname,
                "PORT": place.port,
            },
        }
    )["shop"]
    yield "shop"
    connections["shop"].close()
    del connections["shop"], connections.settings["shop"]


def test_a_migration_creates_the_outbox_and_atomic_blocks_write_to_it(alias: str, database: Database) -> None:
    connection = connections[alias]
    migration = Migration("0001_outbox", "shop")
    migration.operations = [MigrateOutbox()]
    for _ in range(2):  # idempotent
        with connection.schema_editor(atomic=migration.atomic) as editor:
            migration.apply(ProjectState(), editor)
    with transaction.atomic(using=alias):
        event_id = emit(connection, "order.paid", {"total": "100 %"}, aggregate_id=7)
    with transaction.atomic(using=alias):
        emit(connection, "order.paid")
        transaction.set_rollback(True, using=alias)
    rows = database.execute("select event_id, key, payload from mailboat.outbox")
    assert rows == [(event_id, "7", b'{"total":"100 %"}')]


def test_emit_outside_of_atomic_or_of_postgres_is_refused(alias: str) -> None:
    with pytest.raises(EmitRefused, match=r"inside `with transaction.atomic\(\):`"):
        emit(connections[alias], "order.paid")
    with pytest.raises(EmitRefused, match="a sqlite database of Django: the outbox is in PostgreSQL"):
        emit(connections["default"], "order.paid")
