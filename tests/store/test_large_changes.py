"""Rare changes that may exceed the deadline of a statement, because their duration grows with the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from mailboat.store.cursor_changes import rebase
from mailboat.store.subscription_rows import declare
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database, PostgresServer
from support.databases import connected, migrated_database
from support.memory_outbox.rows import slot_of
from support.store_backends import PostgresWorld, subscription
from support.store_relays import Relay
from support.wait import await_until

DEADLINE = 3.0


@pytest.fixture
def slow(postgres: PostgresServer) -> Iterator[Database]:
    """Database where updates of events and deletes of cursors exceed the deadline, as with millions of rows."""
    for database in migrated_database(postgres):
        with psycopg.connect(database.url) as connection:
            connection.execute(
                "create function public.slowly() returns trigger language plpgsql as"
                " $$ begin perform pg_sleep(4); return null; end $$"
            )
            for change in ("update on mailboat.outbox", "delete on mailboat.cursors"):
                trigger = f"create trigger slow after {change} for each statement execute function public.slowly()"
                connection.execute(trigger.encode())
        yield database


async def test_a_rebase_takes_the_time_it_takes(slow: Database) -> None:
    async with connected(slow.url, "rebase", deadline=DEADLINE) as link:
        assert await declare(link, TableLayout(), subscription(partitions=3), may_lay_out=True)
        slow.execute("select mailboat.emit('x', '{}'::jsonb)")
        slow.execute("update mailboat.cursors set system_identifier = 1")
        assert await rebase(link, TableLayout()) == 3


async def test_another_number_of_partitions_takes_the_time_it_takes(slow: Database) -> None:
    async with connected(slow.url, "control", deadline=DEADLINE) as link:
        await declare(link, TableLayout(), subscription(partitions=3), may_lay_out=True)
        route = await declare(link, TableLayout(), subscription(partitions=5), may_lay_out=True)
        assert route is not None
        assert (route.subscription.partitions, route.subscription.generation) == (5, 2)


async def test_subscriptions_repartitioned_at_the_same_time_share_no_window(outbox: Database) -> None:
    world = PostgresWorld(outbox)
    relay = await Relay.start(world, [subscription("one"), subscription("other")])
    outbox.execute(
        "update mailboat.cursors set window_snapshot = '10:10:', lowest = 1, highest = 2,"
        """ previous_layout = '{"partitions": 1, "cursors": [{"settled_snapshot": "3:3:"}]}'"""
    )
    await relay.claim()
    windows = {key.subscription: cursor.window for key, cursor in relay.cursors.items()}
    assert len(windows) == len(set(windows.values())) == 2
    assert all(window is not None and window.carry_over for window in windows.values())
    await world.close()


async def test_a_cursor_that_was_repartitioned_since_the_last_poll_is_not_claimed(outbox: Database) -> None:
    """Such a relay would read by the old number of partitions and settle by the new one.

    Half of the events would be lost.
    """
    world = PostgresWorld(outbox)
    late = await Relay.start(world, [subscription(partitions=8)], "late")
    known = (await late.store.beat()).subscriptions
    other = await Relay.start(world, [subscription(partitions=4)], "other")
    half = [key for key in late.keys if key.partition < 4]
    assert await late.claim(half) == []
    assert sorted(await other.claim()) == half
    assert (await late.store.beat()).subscriptions != known, "how it learns of it"
    await world.close()


@pytest.mark.parametrize("older", [0, 1])
async def test_of_cursors_that_end_at_the_same_transaction_the_one_that_waits_for_more_is_the_oldest(
    outbox: Database, older: int
) -> None:
    """The new cursors start from that snapshot. From a later one they would skip the event that it waits for."""
    world = PostgresWorld(outbox)
    late, other = world.begin(early=True), world.begin(early=True)
    await Relay.start(world, [subscription()])
    ((before,),) = outbox.execute("select pg_current_snapshot()::text")
    late.insert("late", key=next(key for key in "abcdefgh" if slot_of(key, 0) % 2 == older))
    late.commit()
    ((late_xid,),) = outbox.execute("select xid::text from mailboat.outbox")
    _, xmax, in_progress = before.split(":")
    left = [xid for xid in in_progress.split(",") if xid != late_xid]
    after = f"{left[0]}:{xmax}:{','.join(left)}"  # a new snapshot may end later, since other tests write to this server
    with psycopg.connect(outbox.url) as connection:
        for partition, settled_snapshot in ((older, before), (1 - older, after)):
            set_done = "update mailboat.cursors set settled_snapshot = %s::pg_snapshot where partition = %s"
            connection.execute(set_done, [settled_snapshot, partition])
    await Relay.start(world, [subscription(partitions=4)], "second")
    assert outbox.execute("select distinct settled_snapshot::text from mailboat.cursors") == [(before,)]
    relay = await Relay.start(world, [subscription(partitions=8)], "third")
    await relay.claim()
    (window,) = {cursor.window for cursor in relay.cursors.values()}
    assert window is not None, "there is something to finish"
    chunk = await relay.store.read(window, [cursor.lease for cursor in relay.cursors.values()], 0)
    assert [event.type for events in chunk.events.values() for event in events] == ["late"]
    other.rollback()
    await world.close()


_WAITING = "select 1 from pg_stat_activity where application_name = 'mailboat control' and wait_event_type = 'Lock'"


async def test_no_cursor_is_locked_while_a_backlog_is_scanned(
    outbox_database: Database,
) -> None:
    async with connected(outbox_database.url, "control") as link:
        await declare(link, TableLayout(), subscription(partitions=3), may_lay_out=True)
        outbox_database.execute("select mailboat.emit('x', '{}'::jsonb)")
        with psycopg.connect(outbox_database.url) as slow, psycopg.connect(outbox_database.url) as tick:
            slow.execute("lock table mailboat.outbox in access exclusive mode")  # as long as with millions of rows
            laying_out = asyncio.ensure_future(
                declare(link, TableLayout(), subscription(partitions=5), may_lay_out=True)
            )
            await await_until(lambda: outbox_database.execute(_WAITING), what="the look to be under way")
            tick.execute("select from mailboat.cursors for update nowait")
            tick.execute("select from mailboat.subscriptions for update nowait")
            tick.rollback()
            slow.rollback()
            route = await laying_out
        assert route is not None
        assert (route.subscription.partitions, route.subscription.generation) == (5, 2)
        assert outbox_database.execute("select distinct lowest = highest from mailboat.cursors") == [(True,)]
