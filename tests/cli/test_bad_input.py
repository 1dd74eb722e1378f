"""Whatever a person gets wrong: one clear message, an exit code of its own, no traceback, no secret."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import sql

from commandline import Place, make_known, relay_manifest, subscription_manifest
from mailboat.cli.main import exit_code
from mailboat.errors import (
    ConfigError,
    DatabaseUnavailable,
    EmitRefused,
    ForeignDatabase,
    LeaseLost,
    MailboatError,
    SchemaMismatch,
)
from mailboat_harbor.ports import free_port


def refused(place: Place, code: int, *arguments: str) -> str:
    """The message of a command that must be refused."""
    result = place.mailboat(*arguments)
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}"
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MailboatError(), 1),
        (ConfigError(), 3),
        (EmitRefused(), 3),
        (SchemaMismatch(), 4),
        (DatabaseUnavailable(), 5),
        (ForeignDatabase(), 6),
        (LeaseLost(), 7),
    ],
)
def test_each_kind_of_error_has_an_exit_code(error, code):
    assert exit_code(error) == code


def test_an_unknown_field_is_named_with_the_right_one(place):
    place.write(relay_manifest(place.database.url, tabel="x.y"), subscription_manifest())
    message = refused(place, 3, "status")
    assert message.startswith("mailboat: ")
    assert "manifests.yaml, document 1: spec.outbox.tabel: unknown field, did you mean table?" in message


def test_all_problems_are_told_at_once(place):
    place.write(relay_manifest(place.database.url, tabel="x.y"), subscription_manifest(partitions=0, sink={"lgo": {}}))
    message = refused(place, 3, "run")
    assert "spec.outbox.tabel" in message
    assert "spec.partitions" in message
    assert "spec.sink" in message


def test_a_path_that_is_not_there_is_named(place):
    result = place.mailboat("status", "-f", "nowhere.yaml", manifests=False)
    assert result.exit_code == 3
    assert "nowhere.yaml does not exist" in result.stderr


def test_a_database_that_nobody_migrated_says_how_to(empty_place):
    assert "Run `mailboat migrate`" in refused(empty_place, 4, "status")
    assert "Run `mailboat migrate`" in refused(empty_place, 4, "dlq", "list")


def test_a_missing_table_is_named(place):
    place.database.execute("drop table mailboat.dead_letters")
    assert 'relation "mailboat.dead_letters" does not exist' in refused(place, 4, "dlq", "list")


def test_a_wrong_password_is_told_and_not_repeated(place):
    place.database.server.execute("create role careless login password 'right' in role needs_password")
    try:
        manifest = relay_manifest("")
        manifest["spec"]["database"] = {"urlSecretRef": {"name": "orders-db", "key": "url"}}
        place.write(manifest, subscription_manifest())
        place.environment["MAILBOAT_SECRET_ORDERS_DB_URL"] = place.database.url_for("careless", "hunter2")
        message = refused(place, 5, "status")
    finally:
        place.database.server.execute("drop role careless")
    assert 'password authentication failed for user "careless"' in message
    assert "hunter2" not in message


def test_a_secret_that_is_nowhere_says_where_was_looked(place, tmp_path):
    manifest = relay_manifest("")
    manifest["spec"]["database"] = {"urlSecretRef": {"name": "orders-db", "key": "url"}}
    place.write(manifest, subscription_manifest())
    message = refused(place, 3, "status", "--secrets-dir", str(tmp_path))
    assert "OutboxRelay shop/orders: spec.database.urlSecretRef" in message
    assert f"{tmp_path}/orders-db/url" in message
    assert "$MAILBOAT_SECRET_ORDERS_DB_URL" in message


def test_a_url_that_libpq_does_not_understand_is_not_repeated(place):
    manifest = relay_manifest("")
    manifest["spec"]["database"] = {"urlSecretRef": {"name": "db", "key": "url"}}
    place.write(manifest, subscription_manifest())
    place.environment["MAILBOAT_SECRET_DB_URL"] = "postgresql://me:hunter2@host:port/db?nonsense=1"
    message = refused(place, 3, "status")
    assert "is not one that libpq understands" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("command", [("status",), ("migrate",), ("verify",), ("dlq", "list"), ("pause", "to-log")])
def test_a_database_that_is_not_there_is_told(place, command):
    place.write(relay_manifest(f"postgresql://postgres@127.0.0.1:{free_port()}/x"), subscription_manifest())
    assert "connection refused" in refused(place, 5, *command).lower()


def test_a_restored_dump_is_rebased_only_on_request(place):
    asyncio.run(make_known(place.database, subscription_manifest()))
    place.database.execute("update mailboat.cursors set system_identifier = 4711")
    assert "say --yes" in refused(place, 3, "rebase")
    assert place.ok("rebase", "--yes") == "shop/orders: 2 cursors rebased\n"
    assert place.ok("rebase", "--yes") == "shop/orders: all cursors are of this database already\n"


def test_a_subscription_that_nobody_knows_is_told_with_those_that_are(place):
    asyncio.run(make_known(place.database, subscription_manifest()))
    message = refused(place, 3, "pause", "to-lag")
    assert message == "mailboat: the database knows no subscription to-lag. It knows: shop/to-log.\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("dlq", "replay"), "say which ones"),
        (("parked", "retry"), "say which ones"),
        (("parked", "drop"), "say which ones"),
        (("dlq", "list", "--since", "yesterday"), "write a time like 2026-01-31T12:00:00Z"),
        (("dlq", "list", "--since", "2d"), 'write "48h"'),
        (("dlq", "list", "--id", "abc"), "neither a number nor an event's id"),
        (("dlq", "list", "--type", "order.[ab]"), "character classes"),
        (("dlq", "purge", "--older-than", "5"), 'write "5s"'),
        (("emit", "order.placed", "{}", "--header", "x"), "NAME=VALUE"),
        (("status", "--url", "localhost"), "either -f or --url"),
    ],
)
def test_wrong_usage_is_told(place, arguments, complaint):
    result = place.mailboat(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr


def test_what_must_not_enter_the_outbox_is_refused(place):
    assert "is not JSON" in refused(place, 3, "emit", "order.placed", "{")
    assert place.database.execute("select count(*) from mailboat.outbox") == [(0,)]


def test_a_bug_is_not_thrown_at_the_user(place, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("postgresql://me:hunter2@host/db")

    monkeypatch.setattr("mailboat.cli.status.outboxes", broken)
    message = refused(place, 1, "status")
    assert "This is a bug in Mailboat" in message
    assert "hunter2" not in message
    debugged = place.mailboat("--debug", "status")
    assert "Traceback" in debugged.stderr
    assert "hunter2" not in debugged.stderr


def test_what_a_server_says_does_not_steer_the_terminal(place):
    hostile = sql.SQL("alter table mailboat.dead_letters rename column last_error to {}").format(
        sql.Identifier("last_error\x1b[31m")
    )
    place.database.execute(hostile)
    assert "\x1b" not in refused(place, 4, "dlq", "list")
