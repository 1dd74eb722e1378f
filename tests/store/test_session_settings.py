"""Sessions inherit no settings from the role or the database.

Such settings therefore cannot lose events, stop a relay, or redirect its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from mailboat.errors import LeaseLost, SchemaMismatch
from mailboat.store.connection import Pipeline, PostgresConnection
from mailboat.store.leases import lock_key
from mailboat_devservers.pgbouncer import PgBouncer, start_pgbouncer
from mailboat_devservers.postgres import Database, PostgresServer
from support.databases import logged_in, migrated_database
from support.store_backends import PostgresWorld, subscription
from support.store_relays import Relay, write

INHERITED = {
    "search_path": ("public", "pg_catalog, pg_temp"),
    "default_transaction_isolation": ("serializable", "read committed"),  # G10
    "transaction_isolation": (None, "read committed"),
    "default_transaction_read_only": ("on", "off"),
    "transaction_read_only": (None, "off"),
    "row_security": ("on", "off"),  # G1
    "statement_timeout": ("1h", "0"),
    "lock_timeout": ("1h", "0"),
    "idle_session_timeout": ("1h", "0"),
    "transaction_timeout": ("1h", "0"),
    "idle_in_transaction_session_timeout": ("1h", "10s"),
    "datestyle": ("German", "ISO, YMD"),
    "timezone": ("Asia/Tokyo", "UTC"),
    "quote_all_identifiers": ("on", "off"),
}
"""Setting -> value set on the database (None: derived from the setting before), value in a session."""


@pytest.fixture(params=["postgres", "postgres14"])
def hostile(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A migrated database with values for all settings that a session could inherit."""
    server: PostgresServer = request.getfixturevalue(request.param)
    for database in migrated_database(server):
        known = {name for (name,) in server.execute("select lower(name) from pg_settings")}
        for name, (value, _) in INHERITED.items():
            if value is not None and name in known:
                server.execute(
                    sql.SQL("alter database {} set {} = {}").format(
                        sql.Identifier(database.name), sql.Identifier(name), sql.Literal(value)
                    )
                )
        yield database


@pytest.fixture(params=["direct", "pgbouncer"])
def url(
    request: pytest.FixtureRequest,
    hostile: Database,
    tmp_path: Path,
    or_skip: Callable[[Callable[[], PgBouncer]], PgBouncer],
) -> Iterator[str]:
    if request.param == "direct":
        yield hostile.url
    else:
        with or_skip(lambda: start_pgbouncer(tmp_path / "bouncer", hostile.server)) as bouncer:
            yield bouncer.url(hostile.name)


async def test_every_session_has_separate_settings(hostile: Database, url: str) -> None:
    link = await PostgresConnection.open(lambda: url, "work")
    known = {name for (name,) in hostile.server.execute("select lower(name) from pg_settings")}
    expected = {name: value for name, (_, value) in INHERITED.items() if name in known}
    ask = sql.SQL("select {}").format(
        sql.SQL(", ").join(sql.SQL("pg_catalog.current_setting({})").format(sql.Literal(name)) for name in expected)
    )

    def in_thread(pipeline: Pipeline) -> Any:
        return pipeline.send(ask).fetchone()

    def in_reader(pipeline: Pipeline) -> Callable[[], Any]:
        answer = in_thread(pipeline)
        return lambda: answer

    try:
        assert link.server.pooled is (url != hostile.url)
        found = {}
        async with link.transaction() as cursor:
            await cursor.execute(ask)
            found["transaction"] = await cursor.fetchone()
        async with link.autocommit() as cursor:
            await cursor.execute(ask)
            found["single statement"] = await cursor.fetchone()
        async with link.connection.transaction():
            found["migration"] = await (await link.connection.execute(ask)).fetchone()
        found["tick"] = await link.pipeline(in_thread)
        found["read"] = await link.read(in_reader)
    finally:
        await link.close()
    *most, read = [dict(zip(expected, row or (), strict=True)) for row in found.values()]
    assert most == [expected] * 4
    assert read == expected | {"transaction_isolation": "repeatable read", "transaction_read_only": "on"}
    with psycopg.connect(url) as connection:  # a session that the pooler passes on is unchanged
        assert connection.execute("show search_path").fetchone() == ("public",)


async def test_functions_of_the_users_path_are_not_called(outbox: Database) -> None:
    """Neither a relay nor ``mailboat.emit`` calls them.

    Otherwise a user with CREATE on one schema of the path would control both sessions.
    """
    outbox.execute("create schema planted")
    for function in ("clock_timestamp()", "to_regclass(text)", "pg_current_snapshot()", "octet_length(bytea)"):
        outbox.execute(
            sql.SQL(
                "create function planted.{} returns text language plpgsql as $$ begin raise 'led astray'; end $$"
            ).format(sql.SQL(function))
        )
    outbox.execute(
        sql.SQL("alter database {} set search_path = planted, pg_catalog").format(sql.Identifier(outbox.name))
    )
    world = PostgresWorld(outbox)
    relay = await Relay.start(world, [subscription()])
    await relay.claim()
    outbox.execute("select mailboat.emit('sql', '{}'::jsonb)")
    outbox.execute("""select mailboat.emit_many('[{"event_type": "many"}]')""")
    assert [event.type for event in await relay.drained()] == ["sql", "many"]
    await world.close()


async def test_rows_that_a_policy_hides_stop_the_relay_and_are_not_skipped(outbox: Database) -> None:
    """Guarantees G1 and G7: a hidden event is indistinguishable from a missing one."""
    with logged_in(outbox, "mailboat_relay") as url:
        world = PostgresWorld(outbox, url=url)
        relay = await Relay.start(world, [subscription()])
        await relay.claim()
        outbox.execute("alter table mailboat.outbox enable row level security")
        outbox.execute("create policy visible on mailboat.outbox for select using (event_type <> 'hidden')")
        write(world, "k", type="hidden")
        with pytest.raises(SchemaMismatch, match=r"row-level security.*alter table .* disable row level security"):
            await relay.tick()
        await world.close()


async def test_a_relay_joins_although_another_session_holds_its_liveness_lock(
    outbox: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Any user can take any advisory lock. A second process with the same relay name is still refused."""
    world = PostgresWorld(outbox)
    with logged_in(outbox, "mailboat_writer") as url, psycopg.connect(url, autocommit=True) as stranger:
        stranger.execute("select pg_advisory_lock(%(high)s, %(low)s)", lock_key("relay"))
        relay = await Relay.start(world, [subscription()])
        assert outbox.execute("select session_lock from mailboat.relays") == [(False,)]
        (warning,) = [record for record in caplog.records if record.getMessage().startswith("Liveness lock")]
        assert "user mailboat_writer" in vars(warning)["holder"]
        assert await relay.claim()
        second = await world.open("relay")
        with pytest.raises(LeaseLost, match="another process runs as relay 'relay'"):
            await second.join()
    await world.close()
