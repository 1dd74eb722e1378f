"""Migrations start concurrently and repeatedly, and apply completely or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from mailboat.errors import DatabaseUnavailable, SchemaMismatch
from mailboat.runtime.maintenance import SchemaGate
from mailboat.store.schema.migrate import Migration, MigrationReport, apply_migrations, known_migrations, pending
from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from mailboat_spec import OutboxRelay
from support.databases import logged_in
from support.manifests import outbox_relay
from support.pull_consumers import Puller, declare

_IN_A_HURRY = {"fsync": "off"}
"""For servers that one test starts and never crashes: a migration creates a hundred files and flushes each."""

OUTBOX = "mailboat.outbox"


async def run(url: str, outbox: str = OUTBOX) -> MigrationReport:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        return await apply_migrations(connection, outbox)


def catalog(database: Database) -> list[tuple[object, ...]]:
    """Return all objects of the schema `mailboat` with their definitions."""
    return [
        *database.execute(
            "select relname, relkind::text, relacl::text, xmin::text from pg_class"
            " where relnamespace = 'mailboat'::regnamespace order by 1"
        ),
        *database.execute(
            "select proname, pg_get_function_identity_arguments(oid), xmin::text from pg_proc"
            " where pronamespace = 'mailboat'::regnamespace order by 1, 2"
        ),
        *database.execute("select version, xmin::text, xmax::text from mailboat.migrations order by 1"),
        *database.execute("select name, xmin::text, xmax::text from mailboat.outboxes order by 1"),
    ]


async def test_the_first_run_applies_everything_and_the_second_writes_nothing(each_database: Database) -> None:
    first = await run(each_database.url)
    assert first.applied == tuple(step.name for step in known_migrations())
    assert first.outbox == OUTBOX
    before = catalog(each_database)
    assert await run(each_database.url) == MigrationReport(OUTBOX, (), first.missing_roles)
    assert catalog(each_database) == before


async def test_a_database_with_events_gets_later_migrations(
    each_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Migrate a database with events, progress and dead letters by one step beyond the known migrations."""
    known = known_migrations()
    later = Migration(len(known) + 1, "9999_later.sql", "alter table mailboat.cursors add later text default 'x'")
    await run(each_database.url)
    each_database.execute(
        "select mailboat.emit('order.placed', '{}'::jsonb, key => 'k');"
        "insert into mailboat.subscriptions (outbox, name, partitions) values ('mailboat.outbox', 'shop/view', 1);"
        "insert into mailboat.cursors (subscription_id, partition, settled_snapshot, system_identifier, timeline)"
        " select id, 0, '3:3:', (select system_identifier from pg_control_system()), 1 from mailboat.subscriptions;"
        "insert into mailboat.dead_letters (subscription_id, partition, attempts, sequence, reason, last_error,"
        " first_failed_at, last_failed_at, id, event_id, event_type, content_type, created_at, slot)"
        " select id, 0, 1, 1, 'Refused', 'no', now(), now(), 1, gen_random_uuid(), 'x', 'text/plain', now(), 0"
        " from mailboat.subscriptions"
    )
    monkeypatch.setattr("mailboat.store.schema.migrate.known_migrations", lambda: (*known, later))
    assert (await run(each_database.url)).applied == (later.name,)
    assert each_database.execute("select later from mailboat.cursors") == [("x",)]
    document = "select mailboat.dead_letter_document(d) ->> 'reason' from mailboat.dead_letters d"
    assert each_database.execute(document) == [("Refused",)]
    await asyncio.to_thread(declare, each_database)
    consumer = Puller(each_database.url)
    assert consumer.take_all() == ["{}"]
    consumer.close()


async def test_eight_starts_at_once_migrate_once(each_database: Database) -> None:
    reports = await asyncio.gather(*[run(each_database.url) for _ in range(8)])
    assert sorted(len(report.applied) for report in reports) == [0] * 7 + [len(known_migrations())]


async def test_eight_outboxes_at_once(each_database: Database) -> None:
    names = [f"shop.outbox{number}" for number in range(8)]
    await asyncio.gather(*[run(each_database.url, name) for name in names])
    assert [name for (name,) in each_database.execute("select name from mailboat.outboxes order by 1")] == names


async def test_with_nothing_to_do_no_lock_is_waited_for(outbox: Database) -> None:
    with psycopg.connect(outbox.url) as other:
        other.execute("lock table mailboat.migrations in share row exclusive mode")
        other.execute("select pg_advisory_xact_lock(1835167604, 0)")
        async with asyncio.timeout(20):
            assert (await run(outbox.url)).applied == ()


async def test_no_lock_that_a_writer_can_take_holds_a_migration_up(outbox: Database) -> None:
    with logged_in(outbox, "mailboat_writer") as url, psycopg.connect(url, autocommit=True) as writer:
        writer.execute("select pg_advisory_lock(1835167604, 0)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), writer.transaction():
            writer.execute("lock table mailboat.migrations in access share mode")
        async with asyncio.timeout(20):
            assert (await run(outbox.url, "shop.events")).outbox == "shop.events"


async def test_a_run_that_fails_leaves_nothing_behind(each_database: Database) -> None:
    each_database.execute("create schema shop")
    each_database.execute("create table shop.events (id int)")
    with pytest.raises(SchemaMismatch, match="exists and is not an outbox made by Mailboat"):
        await run(each_database.url, "shop.events")
    assert each_database.execute("select nspname from pg_namespace where nspname = 'mailboat'") == []


async def test_a_connection_can_be_used_after_a_failed_run(each_database: Database) -> None:
    async with await psycopg.AsyncConnection.connect(each_database.url, autocommit=True) as connection:
        with pytest.raises(SchemaMismatch, match=r"named schema\.table"):
            await apply_migrations(connection, "nowhere")
        assert (await apply_migrations(connection, OUTBOX)).applied


@pytest.mark.parametrize(("given", "spelled"), [("Shop.Events", "shop.events"), ("shop.order", 'shop."order"')])
async def test_a_name_that_postgres_spells_otherwise_is_refused(
    each_database: Database, given: str, spelled: str
) -> None:
    # The name of the outbox is part of each subscription, so two spellings would be two outboxes.
    with pytest.raises(SchemaMismatch, match=f"{spelled}: .* choose another name"):
        await run(each_database.url, given)
    assert each_database.execute("select count(*) from pg_namespace where nspname in ('shop', 'mailboat')") == [(0,)]


@pytest.mark.parametrize("name", ["outbox", "a.b.c", "a.", "", "a." + "b" * 54, "a.b; drop table x"])
async def test_a_name_that_can_not_be_an_outbox_is_refused(shared_outbox: Database, name: str) -> None:
    with pytest.raises(SchemaMismatch):
        await run(shared_outbox.url, name)


async def test_a_newer_database_is_refused(outbox: Database) -> None:
    outbox.execute("insert into mailboat.migrations values (9000, '9000_flying.sql', 'x')")
    with pytest.raises(
        SchemaMismatch, match=r"9000_flying.sql.*A newer version of Mailboat migrated it: upgrade this one"
    ):
        await run(outbox.url)


async def test_a_changed_migration_is_refused(outbox: Database) -> None:
    outbox.execute("update mailboat.migrations set checksum = 'x' where version = 1")
    with pytest.raises(SchemaMismatch, match=r"0001_schema was applied to this database with another content"):
        await run(outbox.url)


def test_only_missing_migrations_are_pending() -> None:
    one, two = Migration(1, "0001_a.sql", "select 1"), Migration(2, "0002_b.sql", "select 2")
    assert pending([one, two], []) == (one, two)
    assert pending([one, two], [(1, one.name, one.checksum)]) == (two,)
    assert Migration(1, "0001_a.sql", "a\r\nb").checksum == Migration(1, "0001_a.sql", "a\nb").checksum


def test_migrations_are_numbered_without_gaps() -> None:
    assert [step.version for step in known_migrations()] == list(range(1, len(known_migrations()) + 1))


async def test_a_standby_is_refused(tmp_path: Path) -> None:
    with (
        PostgresServer.start(find_postgres(NEWEST), tmp_path / "primary", settings=_IN_A_HURRY) as primary,
        primary.clone_standby(tmp_path / "standby") as standby,
        pytest.raises(DatabaseUnavailable, match="is a standby"),
    ):
        await run(standby.url())


async def test_a_user_without_the_right_to_create_schemas_gets_the_remedy(each_database: Database) -> None:
    role = f"nobody_{each_database.name}"
    each_database.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    try:
        with pytest.raises(SchemaMismatch, match=r"may not migrate the schema: permission denied for database"):
            await run(each_database.url_for(role))
    finally:
        each_database.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


async def test_an_owner_of_the_prepared_schema_needs_no_right_on_the_database(each_database: Database) -> None:
    role = f"owner_{each_database.name}"
    each_database.execute(
        sql.SQL("create role {0} login; create schema mailboat authorization {0}").format(sql.Identifier(role))
    )
    try:
        assert (await run(each_database.url_for(role))).applied == tuple(step.name for step in known_migrations())
    finally:
        each_database.execute(sql.SQL("drop owned by {0} cascade; drop role {0}").format(sql.Identifier(role)))


async def test_an_owner_without_createrole_migrates_and_hands_the_rest_to_an_administrator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a separate server, where the group roles do not exist yet."""
    with PostgresServer.start(find_postgres(NEWEST), tmp_path / "server", settings=_IN_A_HURRY) as server:
        server.execute("create role shop login")
        server.execute("create database shop owner shop")
        database = Database(server, "shop")
        spec = OutboxRelay.model_validate(outbox_relay()).spec
        schema = SchemaGate("shop/orders", print)
        await schema.prepare(lambda: database.url_for("shop"), spec, 30.0)
        await schema.prepare(lambda: database.url_for("shop"), spec, 30.0)
        assert schema.missing_roles.startswith("create role mailboat_writer nologin;")
        (warning,) = (each for each in caplog.messages if each.startswith("Roles are missing"))
        assert "select mailboat.grant_roles()" in warning
        report = await run(database.url_for("shop"))
        assert report.missing_roles == ("mailboat_writer", "mailboat_relay", "mailboat_consumer")
        database.execute("create role app login")
        for statement in report.sql_for_an_administrator.splitlines():
            database.execute(sql.Composed([sql.SQL(statement)]))
        database.execute("grant mailboat_writer to app")
        with psycopg.connect(database.url_for("app")) as connection:
            connection.execute("select mailboat.emit('order.placed', '{}'::jsonb)")
        assert (await run(database.url_for("shop"))).sql_for_an_administrator == ""


async def test_databases_of_one_server_share_the_roles_even_when_migrated_at_once(tmp_path: Path) -> None:
    with PostgresServer.start(find_postgres(NEWEST), tmp_path / "server", settings=_IN_A_HURRY) as server:
        names = [f"shop{number}" for number in range(4)]
        for name in names:
            server.create_database(name)
        reports = await asyncio.gather(*[run(server.url(name)) for name in names])
        assert [report.missing_roles for report in reports] == [()] * 4
