"""Leases: claims, partitions of dead relays, crash counts, and relays with the same name."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import pytest

from mailboat.errors import LeaseLost
from mailboat.store.outbox_store import Settlement
from support.store_backends import SETTINGS, World, eventually, subscription
from support.store_relays import Relay, write

TWO = [subscription(partitions=2)]

HOUR = timedelta(hours=1)
clocks = pytest.mark.parametrize("set_by", [timedelta(), -HOUR, HOUR], ids=["same clock", "set back", "set forward"])


@clocks
async def test_a_partition_of_a_live_relay_cannot_be_claimed(world: World, set_by: timedelta) -> None:
    first, second = await Relay.start(world, TWO, "first"), await Relay.start(world, TWO, "second")
    one, other = first.keys
    assert await first.claim([one]) == [one]
    world.set_clock(set_by)
    assert await second.claim() == [other]
    holdings = {holding.key: holding.owner for holding in (await first.store.beat()).holdings}
    assert holdings == {one: "first", other: "second"}


async def test_a_released_partition_is_free_at_once_and_counts_no_death(world: World) -> None:
    first, second = await Relay.start(world, TWO, "first"), await Relay.start(world, TWO, "second")
    keys = await first.claim()
    write(world, None, None)
    (opened,) = (await first.tick()).opened
    await first.store.release([first.lease(key) for key in keys])
    assert await second.claim() == keys
    assert [(c.window, c.crash_count) for c in second.cursors.values()] == [(opened.window, 0)] * 2


async def test_a_renewed_lease_keeps_the_progress_and_ends_the_former_one(world: World) -> None:
    relay, other = await Relay.start(world, TWO, "relay"), await Relay.start(world, TWO, "other")
    one, two = await relay.claim()
    write(world, None, None)
    await relay.drain()
    former = [relay.lease(one), relay.lease(two)]
    await relay.store.release([relay.lease(two)])
    assert await other.claim() == [two]
    before = relay.cursors[one]
    (renewed,) = await relay.store.renew(former)
    assert renewed.lease.key == one
    assert renewed.lease.epoch != before.lease.epoch
    assert (renewed.sequence, renewed.window, renewed.crash_count) == (relay.sequence[one], None, 0)
    late = await relay.store.tick([Settlement(lease, renewed.settled_snapshot, 0, 9) for lease in former], [])
    assert late.lost == {one, two}
    assert await relay.store.renew(former) == []
    assert await other.claim([one]) == []


async def test_deaths_at_one_position_are_counted_and_progress_forgets_them(world: World) -> None:
    relay = await Relay.start(world, TWO)
    keys = await relay.claim()
    write(world, None, None)
    (opened,) = (await relay.tick()).opened
    for crash_count in (1, 2, 3):
        await relay.crash()
        relay = await Relay.start(world, TWO)
        await relay.claim()
        assert [relay.cursors[key].crash_count for key in keys] == [crash_count, crash_count]
    await relay.store.tick([Settlement(relay.lease(keys[0]), opened.window.window_snapshot, 0, 0)], [])
    await relay.crash()
    relay = await Relay.start(world, TWO)
    await relay.claim()
    assert [relay.cursors[key].crash_count for key in keys] == [1, 4]


async def test_dying_while_the_subscription_is_paused_counts_nothing(world: World) -> None:
    """No event was in flight, so no event can be the cause of the death."""
    relay = await Relay.start(world, TWO)
    keys = await relay.claim()
    write(world, None, None)
    await relay.tick()
    for paused, counted in ((True, 0), (True, 0), (False, 1), (True, 1), (False, 2)):
        world.pause(keys[0].subscription, paused)
        await relay.crash()
        relay = await Relay.start(world, TWO)
        assert await relay.claim() == keys
        assert [relay.cursors[key].crash_count for key in keys] == [counted, counted]


async def test_a_crash_without_events_in_flight_is_not_counted(world: World) -> None:
    """While the sink is unavailable, a relay settles with ``in_flight=False``."""
    relay = await Relay.start(world, TWO)
    keys = await relay.claim()
    write(world, None, None)
    await relay.tick()
    for in_flight, counted in ((False, 0), (False, 0), (True, 1), (False, 1), (True, 2)):
        said = [Settlement(relay.lease(key), None, in_flight=in_flight) for key in keys]
        assert not (await relay.store.tick(said, [])).lost
        await relay.crash()
        relay = await Relay.start(world, TWO)
        assert await relay.claim() == keys
        assert [relay.cursors[key].crash_count for key in keys] == [counted, counted]


async def test_a_crash_after_a_renewal_is_counted(world: World) -> None:
    """The worker of a renewed cursor publishes without another note that events are in flight."""
    relay = await Relay.start(world, TWO)
    keys = await relay.claim()
    write(world, None, None)
    await relay.tick()
    assert not (await relay.store.tick([Settlement(relay.lease(key), None, in_flight=False) for key in keys], [])).lost
    assert len(await relay.store.renew([relay.lease(key) for key in keys])) == 2
    await relay.crash()
    relay = await Relay.start(world, TWO)
    await relay.claim()
    assert [relay.cursors[key].crash_count for key in keys] == [1, 1]


@clocks
async def test_a_dead_relay_is_expired_and_its_partitions_are_taken_over(world: World, set_by: timedelta) -> None:
    first, second = await Relay.start(world, TWO, "first"), await Relay.start(world, TWO, "second")
    keys = await first.claim()
    membership = await second.store.beat()
    assert {peer.id for peer in membership.peers if peer.alive} == {"first", "second"}
    assert await second.claim() == []
    await first.crash()
    world.set_clock(set_by)
    await eventually(lambda: _alone(second), what="the burial of the dead relay")
    assert await second.claim() == keys


async def _alone(relay: Relay) -> bool:
    return sum(peer.alive for peer in (await relay.store.beat()).peers) == 1


async def test_a_silent_relay_whose_lease_is_valid_is_not_expired(world: World) -> None:
    patient = replace(SETTINGS, overdue_after=3600.0)
    first = await Relay.start(world, TWO, "first", patient)
    second = await Relay.start(world, TWO, "second", patient)
    await first.claim()
    await first.crash()
    assert {peer.id for peer in (await second.store.beat()).peers if peer.alive} == {"first", "second"}
    assert await second.claim() == []


async def test_silence_before_the_first_poll_expires_no_relay(world: World) -> None:
    """After a restart of the database, all locks are free and all heartbeats are old. The first relay must wait."""
    patient = replace(SETTINGS, overdue_after=30.0)
    first = await Relay.start(world, TWO, "first", patient)
    await first.claim()
    await first.crash()
    world.set_clock(timedelta(minutes=1))
    second = await Relay.start(world, TWO, "second", patient)
    assert {peer.id for peer in (await second.store.beat()).peers if peer.alive} == {"first", "second"}
    assert await second.claim() == []


async def test_leases_expire_and_a_heartbeat_renews_all_of_them(world: World) -> None:
    brief = replace(SETTINGS, lease_ttl=0.5)
    first = await Relay.start(world, TWO, "first", brief)
    second = await Relay.start(world, TWO, "second")
    keys = await first.claim()
    world.set_clock(-HOUR)
    renewed = time.monotonic()
    await first.store.beat()
    await second.store.beat()
    assert await second.claim() == [] or time.monotonic() - renewed > brief.lease_ttl
    await eventually(lambda: _alone(second), what="the end of the leases")
    await second.claim()
    assert sorted(second.cursors) == keys
    stale = [Settlement(first.lease(key), None, unpark=(1,)) for key in keys]
    assert (await first.store.tick(stale, [])).lost == set(keys)
    with pytest.raises(LeaseLost, match="declared dead"):
        await first.store.beat()


async def test_a_relay_that_leaves_is_not_waited_for(world: World) -> None:
    first, second = await Relay.start(world, TWO, "first"), await Relay.start(world, TWO, "second")
    keys = await first.claim()
    await first.store.close(leave=True)
    assert [peer.id for peer in (await second.store.beat()).peers] == ["second"]
    assert await second.claim() == keys


async def test_a_name_can_be_used_by_one_process_only(world: World) -> None:
    await Relay.start(world, TWO, "first")
    other = await world.open("first")
    await other.declare(TWO)
    with pytest.raises(LeaseLost, match="another process runs as relay 'first'"):
        await other.join()


async def test_the_heartbeat_of_an_expired_relay_raises(world: World) -> None:
    brief = replace(SETTINGS, lease_ttl=0.01)
    first = await Relay.start(world, TWO, "first", brief)
    await first.claim()
    write(world, None)
    await first.tick()
    ghost = first.store
    await first.crash()
    replacement = await Relay.start(world, TWO, "first")
    await replacement.claim()
    assert sorted((c.window is not None, c.crash_count) for c in replacement.cursors.values()) == [
        (False, 1),
        (True, 1),
    ]
    with pytest.raises(Exception, match=r"replaced by another process|closed"):
        await ghost.beat()


async def test_a_repeated_claim_of_an_own_partition_counts_no_crash(world: World) -> None:
    relay = await Relay.start(world, TWO)
    keys = await relay.claim()
    write(world, None, None)
    await relay.tick()
    before = [relay.lease(key) for key in keys]
    assert await relay.claim() == keys
    assert [cursor.crash_count for cursor in relay.cursors.values()] == [0, 0]
    assert (await relay.store.tick([Settlement(lease, None, unpark=(1,)) for lease in before], [])).lost == set(keys)
