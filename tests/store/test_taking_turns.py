"""Locks between settlements, changes of cursors, and changes of parked events.

A transaction that deletes cursors or changes parked events waits for the holder of the cursors, and then sees the
changes of the holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import psycopg
import pytest

from mailboat.store.admin.dead_letters import Candidate, candidates, plan, replay
from mailboat.store.admin.selection import Match
from mailboat.store.connection import PostgresConnection
from mailboat.store.subscription_rows import ConfigVersion, clear_expired, declare, retire_removed
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from mailboat_spec import EventSubscription
from support.databases import connected
from support.store_backends import subscription
from support.wait import await_until

OUTBOX = "mailboat.outbox"
_PARK = (
    "insert into mailboat.parked (subscription_id, partition, sequence, id, event_id, event_type, content_type,"
    " created_at, slot) select subscription_id, partition, 1, 1, gen_random_uuid(), 'x', 'text/plain', now(), 0"
    " from mailboat.cursors where partition = 0"
)
_BURY = (
    "insert into mailboat.dead_letters (subscription_id, partition, attempts, sequence, reason, last_error,"
    " first_failed_at, last_failed_at, id, event_id, event_type, content_type, created_at, slot)"
    " select id, 0, 1, 1, 'Refused', 'no', now(), now(), 1, gen_random_uuid(), 'x', 'text/plain', now(), 0"
    " from mailboat.subscriptions"
)
_LAY_OUT = (
    "with old as (delete from mailboat.cursors where partition = 0 returning *) insert into mailboat.cursors"
    " (subscription_id, partition, settled_snapshot, system_identifier, timeline)"
    " select subscription_id, partition, settled_snapshot, system_identifier, timeline from old"
)


def of_uid(uid: str) -> EventSubscription:
    declared = subscription(partitions=2)
    return declared.model_copy(update={"metadata": declared.metadata.model_copy(update={"uid": uid})})


async def waits_for(each_outbox: Database, holder: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Wait until a session waits for a lock of this connection."""
    await await_until(
        lambda: any(
            holder.info.backend_pid in pids
            for (pids,) in each_outbox.execute(
                "select pg_blocking_pids(pid) from pg_stat_activity where datname = current_database()"
            )
        ),
        what="somebody to wait for the lock",
    )


async def expire(link: PostgresConnection) -> None:
    async with link.autocommit() as cursor:
        await cursor.execute("update mailboat.subscriptions set retired_at = now() - interval '25 hours'")


async def give_up(link: PostgresConnection) -> None:
    await expire(link)
    assert await clear_expired(link, OUTBOX) == ["shop/all"]


async def renew(link: PostgresConnection) -> None:
    await expire(link)
    assert await declare(link, TableLayout(), of_uid("new"), may_lay_out=True, version=ConfigVersion(2, "orders"))


async def retire(link: PostgresConnection) -> None:
    assert await retire_removed(link, OUTBOX, "relay", [], ConfigVersion(2, "orders")) == (["shop/all"], [])


async def lay_out(link: PostgresConnection) -> None:
    declared = subscription(partitions=3)
    assert await declare(link, TableLayout(), declared, may_lay_out=True, version=ConfigVersion(2, "orders"))


@pytest.mark.parametrize("change", [renew, give_up, retire, lay_out])
async def test_a_tick_that_holds_some_cursors_and_needs_others_never_deadlocks(
    each_outbox: Database, link: PostgresConnection, change: Callable[[PostgresConnection], Coroutine[Any, Any, None]]
) -> None:
    """A tick locks cursors in any order.

    A transaction that needs all cursors of a subscription releases its locks and waits.
    """
    await declare(link, TableLayout(), of_uid("old"), may_lay_out=True, version=ConfigVersion(1, "orders"))
    async with await psycopg.AsyncConnection.connect(each_outbox.url) as tick:
        await tick.execute("select from mailboat.cursors where partition = 1 for no key update")
        changing = asyncio.create_task(change(link))
        await waits_for(each_outbox, tick)
        await tick.execute("select from mailboat.cursors where partition = 0 for no key update")
    await changing


@pytest.mark.parametrize("end", [renew, give_up])
async def test_events_parked_during_the_deletion_of_a_subscription_are_deleted_with_it(
    each_outbox: Database, link: PostgresConnection, end: Callable[[PostgresConnection], Awaitable[None]]
) -> None:
    """Otherwise a new subscription of the same name would deliver events of the old one."""
    await declare(link, TableLayout(), of_uid("old"), may_lay_out=True, version=ConfigVersion(1, "orders"))
    with psycopg.connect(each_outbox.url) as owner:
        owner.execute("update mailboat.cursors set position = 1 where partition = 0")
        owner.execute(_PARK)
        ending = asyncio.ensure_future(end(link))
        await waits_for(each_outbox, owner)
        owner.commit()
        await ending
    assert each_outbox.execute("select count(*) from mailboat.parked") == [(0,)]
    assert each_outbox.execute("select count(*) from mailboat.cursors where position > 0") == [(0,)]


async def test_a_replay_during_the_deletion_of_a_subscription_is_deleted_with_it(
    each_outbox: Database, link: PostgresConnection
) -> None:
    await declare(link, TableLayout(), of_uid("old"), may_lay_out=True, version=ConfigVersion(1, "orders"))
    each_outbox.execute(_BURY)
    async with connected(each_outbox.url, "replay") as person:
        chosen = await dead(person)
        with psycopg.connect(each_outbox.url) as slow:
            slow.execute("select from mailboat.dead_letters for update")
            replaying = asyncio.ensure_future(replay(person, OUTBOX, chosen, again=False))
            await waits_for(each_outbox, slow)
            ending = asyncio.ensure_future(give_up(link))
            await waits_for(each_outbox, person.connection)
        assert await replaying == 1
        await ending
    assert each_outbox.execute("select count(*) from mailboat.parked") == [(0,)]


async def dead(link: PostgresConnection) -> tuple[Candidate, ...]:
    return plan(await candidates(link, Match(OUTBOX), replayed=False, limit=None)).replay


async def test_a_replay_holds_the_cursor_that_a_new_layout_put_in_the_place_of_the_old(
    each_outbox: Database, link: PostgresConnection
) -> None:
    await declare(link, TableLayout(), of_uid("old"), may_lay_out=True)
    each_outbox.execute(_BURY)
    chosen = await dead(link)
    with (
        psycopg.connect(each_outbox.url) as laying_out,
        psycopg.connect(each_outbox.url) as slow,
        psycopg.connect(each_outbox.url) as owner,
    ):
        slow.execute("select from mailboat.dead_letters for update")  # stops the replay here
        laying_out.execute(_LAY_OUT)
        replaying = asyncio.ensure_future(replay(link, OUTBOX, chosen, again=False))
        await waits_for(each_outbox, laying_out)
        laying_out.commit()
        await waits_for(each_outbox, slow)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            owner.execute("select from mailboat.cursors where partition = 0 for no key update nowait")
        slow.rollback()
        assert await replaying == 1
    assert each_outbox.execute("select partition from mailboat.parked") == [(0,)]


async def test_a_replay_into_a_partition_that_is_gone_changes_nothing(
    each_outbox: Database, link: PostgresConnection
) -> None:
    await declare(link, TableLayout(), of_uid("old"), may_lay_out=True)
    each_outbox.execute(_BURY)
    chosen = await dead(link)
    with psycopg.connect(each_outbox.url) as laying_out:
        laying_out.execute("delete from mailboat.cursors where partition = 0")
        replaying = asyncio.ensure_future(replay(link, OUTBOX, chosen, again=False))
        await waits_for(each_outbox, laying_out)
        laying_out.commit()
        assert await replaying == 0
    assert each_outbox.execute("select replayed_at from mailboat.dead_letters") == [(None,)]
    assert each_outbox.execute("select count(*) from mailboat.parked") == [(0,)]
