"""Wake-up of idle relays, and the lag."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mailboat.store.outbox_store import Settlement
from support.store_backends import SETTINGS, World, subscription
from support.store_relays import Relay, write
from support.wait import await_until

ONE = [subscription(partitions=1)]
DEADLINE = 10.0


async def test_writers_notify_while_a_relay_is_idle(world: World) -> None:
    relay = await Relay.start(world, ONE)
    await relay.store.enable_wakeups()
    write(world, "a")
    assert await relay.store.wait_for_notification(DEADLINE)
    await relay.store.disable_wakeups()
    write(world, "a")
    assert not await relay.store.wait_for_notification(0.05)


async def test_a_rolled_back_event_sends_no_notification(world: World) -> None:
    relay = await Relay.start(world, ONE)
    await relay.store.enable_wakeups()
    writer = world.begin()
    writer.insert("order.placed")
    writer.rollback()
    assert not await relay.store.wait_for_notification(0.05)


async def test_a_transaction_older_than_the_wakeup_request_is_detected(world: World) -> None:
    relay = await Relay.start(world, ONE)
    writer = world.begin()
    writer.insert("order.placed")
    await relay.store.enable_wakeups()
    assert await relay.store.undecided_writers()
    later = world.begin(early=True)
    writer.commit()

    async def decided() -> bool:
        """Return True if no open transaction is waited for.

        Transactions of other tests on the shared server end by themselves.
        """
        return not await relay.store.undecided_writers()

    await await_until(decided, what="the writer that began after the bell hung out is not waited for")
    later.rollback()


async def test_lag_counts_matching_events_that_are_not_settled(world: World) -> None:
    """Guarantee G7."""
    declared = [subscription("all"), subscription("some", filter={"eventTypes": ["b.*"]})]
    relay = await Relay.start(world, declared)
    await relay.claim()
    every, some = sorted(relay.subscriptions, key=lambda n: relay.subscriptions[n].name)
    open_writer = world.begin()
    open_writer.insert("b.x")
    write(world, *[None] * 4, type="a.x")
    write(world, *[None] * 2, type="b.x")

    async def lags(number: int) -> list[int]:
        return sorted(lag.pending for lag in (await relay.store.backlog(number)).partitions.values())

    assert (await lags(every), sum(await lags(some))) == ([3, 3], 2)
    (opened,) = (await relay.tick()).opened
    assert (await lags(every), sum(await lags(some))) == ([3, 3], 2), "taken is not settled"
    key = next(key for key in relay.keys if key.subscription == every)
    events = (await relay.events(opened))[key]
    await relay.tick(Settlement(relay.lease(key), opened.window.window_snapshot, events[0].id, 1))
    assert await lags(every) == [2, 3]
    await relay.tick(Settlement(relay.lease(key), opened.window.window_snapshot, events[2].id, 3, closes=True))
    assert await lags(every) == [3]
    open_writer.commit()
    assert sum(await lags(every)) == 4
    age = max(lag.oldest_age or 0.0 for lag in (await relay.store.backlog(every)).partitions.values())
    assert 0 <= age < 60


async def test_lag_stops_counting_at_its_bound(world: World) -> None:
    relay = await Relay.start(world, ONE, settings=replace(SETTINGS, lag_bound=5))
    await relay.claim()
    (number,) = relay.subscriptions
    write(world, *[None] * 4)
    (lag,) = (await relay.store.backlog(number)).partitions.values()
    assert (lag.pending, lag.bounded) == (4, False)
    write(world, *[None] * 4)
    (lag,) = (await relay.store.backlog(number)).partitions.values()
    assert (lag.pending, lag.bounded) == (5, True)


async def test_a_lag_beyond_the_bound_is_not_reported_as_zero(world: World) -> None:
    """Guarantee G7: all counted rows belong to other subscriptions, and the rows after the bound are unknown."""
    declared = [subscription("some", filter={"eventTypes": ["b.*"]}, partitions=2)]
    relay = await Relay.start(world, declared, settings=replace(SETTINGS, lag_bound=5))
    await relay.claim()
    (number,) = relay.subscriptions
    write(world, *[None] * 4, type="a.x")
    assert not (await relay.store.backlog(number)).partitions
    write(world, *[None] * 4, type="a.x")
    write(world, *[None] * 4, type="b.x")
    lags = (await relay.store.backlog(number)).partitions
    assert [(lag.pending, lag.oldest_age, lag.bounded) for lag in lags.values()] == [(0, None, True)] * 2


@pytest.mark.parametrize("partitions", [1, 3])
async def test_the_backlog_is_empty_once_all_events_are_settled(world: World, partitions: int) -> None:
    relay = await Relay.start(world, [subscription(partitions=partitions)])
    await relay.claim()
    write(world, "a", "b", "c", None)
    await relay.drained()
    (number,) = relay.subscriptions
    backlog = await relay.store.backlog(number)
    assert (dict(backlog.partitions), dict(backlog.parked), backlog.dead) == ({}, {}, 0)
