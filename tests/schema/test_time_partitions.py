"""Creation of time partitions: ahead of time, and without a delay for writers (G10)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from mailboat.errors import SchemaMismatch
from mailboat.store.schema.time_partitions import HardLimit, RetentionSweep, days_ahead, ensure_partitions
from mailboat_devservers.postgres import Database
from support.renamed_table import RENAMED, make_renamed

OUTBOX = "mailboat.outbox"


def bounds(database: Database, table: str = OUTBOX) -> list[tuple[str, str]]:
    rows = database.execute(
        sql.SQL(
            "select c.relname::text, pg_get_expr(c.relpartbound, c.oid) from pg_inherits i join pg_class c"
            " on c.oid = i.inhrelid where i.inhparent = {}::regclass order by 1"
        ).format(sql.Literal(table))
    )
    return [(name, bound) for name, bound in rows]


async def test_a_new_outbox_has_yesterday_today_and_thirty_days(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    assert len(bounds(outbox)) == 32
    assert await ensure_partitions(connection, OUTBOX) == 0
    assert 30 < (await days_ahead(connection, OUTBOX) or 0) <= 31


async def test_bounds_are_days_in_utc_with_any_time_zone_of_the_session(outbox: Database) -> None:
    with psycopg.connect(outbox.url) as connection:
        connection.execute("set timezone = 'Pacific/Chatham'")
        connection.execute("set datestyle = 'SQL, DMY'")
        connection.execute("select mailboat.ensure_partitions('mailboat.outbox', '40 days')")
    for name, bound in bounds(outbox):
        day = name[-8:]
        assert f"FROM ('{day[:4]}-{day[4:6]}-{day[6:]} 00:00:00+00')" in bound
    assert len(bounds(outbox)) == 42


async def test_a_gap_is_seen_and_closed(outbox: Database, connection: psycopg.AsyncConnection) -> None:
    (name, _) = bounds(outbox)[5]
    await connection.execute(f"drop table mailboat.{name}")
    cursor = await connection.execute("select mailboat.ensure_partitions('mailboat.outbox', '0 days')")
    assert await cursor.fetchone() == (0,)
    assert await ensure_partitions(connection, OUTBOX) == 1
    assert (await days_ahead(connection, OUTBOX) or 0) > 30


async def test_eight_at_once_make_each_partition_once(outbox: Database) -> None:
    # The wait for each other's locks is not part of this test, and a busy machine is slow.
    outbox.execute("alter function mailboat.ensure_partitions(text, interval) set lock_timeout = '120s'")
    for name, _ in bounds(outbox)[10:]:
        outbox.execute(sql.SQL("drop table mailboat.{}").format(sql.Identifier(name)))

    async def one() -> int:
        async with await psycopg.AsyncConnection.connect(outbox.url) as connection:
            return await ensure_partitions(connection, OUTBOX)

    assert sorted(await asyncio.gather(*[one() for _ in range(8)])) == [0] * 7 + [22]


async def test_writers_continue_while_time_partitions_are_created_in_an_open_transaction(
    outbox: Database, writer: Any
) -> None:
    async with await psycopg.AsyncConnection.connect(outbox.url) as slow:
        await slow.execute("select mailboat.ensure_partitions('mailboat.outbox', '60 days')")
        await asyncio.to_thread(writer.writes_on)  # with the creating transaction still open
        await slow.commit()
    await asyncio.to_thread(writer.writes_on)
    assert len(bounds(outbox)) == 62


@pytest.mark.parametrize(
    "statement",
    ["select count(*) from mailboat.outbox", "insert into mailboat.outbox (event_type) values ('open')"],
    ids=["open reader", "open writer"],
)
async def test_open_transactions_are_not_in_the_way_of_making_partitions(
    outbox: Database, connection: psycopg.AsyncConnection, statement: str
) -> None:
    outbox.execute(sql.SQL("drop table mailboat.{}").format(sql.Identifier(bounds(outbox)[20][0])))
    async with await psycopg.AsyncConnection.connect(outbox.url) as holder:
        await holder.execute(statement)
        assert await ensure_partitions(connection, OUTBOX) == 1


async def test_a_table_that_blocks_the_migration_is_named(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    name, _ = bounds(outbox)[5]
    await connection.execute(f"alter table mailboat.outbox detach partition mailboat.{name}")
    with pytest.raises(psycopg.errors.DuplicateTable, match=f"table mailboat.{name} is in the way"):
        await connection.execute("select mailboat.ensure_partitions('mailboat.outbox')")


@pytest.mark.parametrize("ahead", ["-1 day", "500 days", None])
def test_an_invalid_number_of_days_ahead_is_refused(shared_outbox: Database, ahead: str | None) -> None:
    with psycopg.connect(shared_outbox.url) as connection, pytest.raises(psycopg.errors.InvalidParameterValue):
        connection.execute("select mailboat.ensure_partitions('mailboat.outbox', %s::interval)", (ahead,))


async def test_a_plain_user_table_needs_no_time_partitions(connection: psycopg.AsyncConnection) -> None:
    await connection.execute("create table public.events ()")
    await connection.execute("insert into mailboat.outboxes (name) values ('public.events')")
    assert await ensure_partitions(connection, "public.events") == 0
    assert await days_ahead(connection, "public.events") is None


async def test_a_table_that_is_no_outbox_is_refused(connection: psycopg.AsyncConnection) -> None:
    for name in ("mailboat.cursors", "pg_catalog.pg_class", "nowhere.at_all"):
        with pytest.raises(SchemaMismatch, match="there is no outbox"):
            await ensure_partitions(connection, name)


def test_new_partitions_have_everything_that_the_outbox_has(shared_outbox: Database) -> None:
    """Partitions are created beside the outbox and attached. Indexes, defaults, checks and the slot must not differ."""
    rows = shared_outbox.execute("""
        select count(*), count(distinct (attributes, indexes, checks))
        from pg_inherits i
        cross join lateral (
            select string_agg(format('%s %s %s', attname, attnotnull, pg_get_expr(adbin, adrelid)), ',' order by attnum)
            from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum
            where attrelid = i.inhrelid and attnum > 0) a (attributes)
        cross join lateral (
            select string_agg(format('%s %s %s', indkey, indisunique, indisvalid), ',' order by indkey::text)
            from pg_index where indrelid = i.inhrelid) x (indexes)
        cross join lateral (
            select string_agg(pg_get_constraintdef(oid), ',')
            from pg_constraint where conrelid = i.inhrelid and contype = 'c') c (checks)
        where i.inhparent = 'mailboat.outbox'::regclass""")
    assert rows == [(32, 1)]
    ((valid,),) = shared_outbox.execute(
        "select bool_and(indisvalid) from pg_index where indrelid = 'mailboat.outbox'::regclass"
    )
    assert valid, "every partition's indexes are attached to the outbox's"


async def test_an_outbox_with_renamed_columns_works_like_any_other(
    outbox: Database, connection: psycopg.AsyncConnection
) -> None:
    make_renamed(outbox)
    await ensure_partitions(connection, RENAMED.table)
    assert (await days_ahead(connection, RENAMED.table) or 0) > 30
    now = datetime.now(UTC)
    first = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=40)
    for day in (first, first + timedelta(days=1)):
        name = f"shop.events_p{day:%Y%m%d}"
        await connection.execute(f"create table {name} (like shop.events including all)")
        await connection.execute(
            f"alter table shop.events attach partition {name} for values from ('{day.isoformat()}')"
            f" to ('{(day + timedelta(days=1)).isoformat()}')"
        )
    await connection.execute(
        """
        with written as (
            insert into shop.events (type, sorted_by, payload, written_at) values ('order.placed', 'a', '{}', %s)),
        slow as (
            insert into mailboat.subscriptions (outbox, name, partitions) values ('shop.events', 'shop/slow', 1)
            returning id)
        insert into mailboat.cursors (subscription_id, partition, settled_snapshot, system_identifier, timeline)
        select s.id, 0, '1:1:', c.system_identifier, 1 from slow s, pg_control_system() c
        """,
        [first],
    )
    old = first + timedelta(days=2)
    held = await RetentionSweep(connection, RENAMED, old, now=now).run()
    assert [blocked.subscription for blocked in held.blocked] == ["shop/slow"]
    assert len(held.dropped) == 1, "the day after"
    report = await RetentionSweep(connection, RENAMED, old, now=now, limit=HardLimit(older_than=old)).run()
    assert [(lost.subscription, lost.events) for lost in report.lost] == [("shop/slow", 1)]
    assert len(report.dropped) == 1
