"""Filters and start positions: SQL and memory give the same events, for several subscriptions read together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mailboat.store.settings import ReadLimits
from support.store_backends import SETTINGS, World, Writer, subscription
from support.store_relays import Relay, write

EVENTS: dict[str, dict[str, Any]] = {
    "placed": {"type": "order.placed", "aggregate_type": "order", "tags": ["eu", "new"]},
    "paid": {"type": "order.paid", "aggregate_type": "order", "tags": ["eu"]},
    "sent": {"type": "parcel.sent", "aggregate_type": "parcel", "tags": []},
    "odd": {"type": r"100%_off\now", "aggregate_type": None, "tags": ["50%"]},
}

CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"placed", "paid", "sent", "odd"}),
    ({"eventTypes": ["order.*"]}, {"placed", "paid"}),
    ({"eventTypes": ["order.placed"]}, {"placed"}),
    ({"eventTypes": ["*.p?id", "parcel.sent"]}, {"paid", "sent"}),
    ({"eventTypes": ["100%*"]}, {"odd"}),
    ({"eventTypes": [r"100%_off\now"]}, {"odd"}),
    ({"eventTypes": [r"?00%_off\*"]}, {"odd"}),
    ({"eventTypes": ["order_placed", "ORDER.PLACED"]}, set()),
    ({"aggregateTypes": ["order"]}, {"placed", "paid"}),
    ({"aggregateTypes": ["p*"]}, {"sent"}),
    ({"aggregateTypes": ["*"]}, {"placed", "paid", "sent", "odd"}),
    ({"tags": {"allOf": ["eu", "new"]}}, {"placed"}),
    ({"tags": {"anyOf": ["new", "50%"]}}, {"placed", "odd"}),
    ({"tags": {"noneOf": ["eu"]}}, {"sent", "odd"}),
    ({"eventTypes": ["order.*"], "tags": {"noneOf": ["new"]}}, {"paid"}),
]


def insert_all(writer: Writer) -> dict[str, str]:
    return {writer.insert(**columns): name for name, columns in EVENTS.items()}


async def test_subscriptions_that_are_read_together_get_their_own_events_each(world: World) -> None:
    declared = [subscription(f"s{n}", partitions=n % 3 + 1, filter=f) for n, (f, _) in enumerate(CASES)]
    relay = await Relay.start(world, declared)
    await relay.claim()
    writer = world.begin()
    names = insert_all(writer)
    writer.commit()
    found: dict[str, set[str]] = {f"shop/s{n}": set() for n in range(len(CASES))}
    for key, events in (await relay.drain()).items():
        found[relay.subscriptions[key.subscription].name] |= {names[event.event_id] for event in events}
    assert found == {f"shop/s{n}": wanted for n, (_, wanted) in enumerate(CASES)}


@pytest.mark.parametrize("limits", [SETTINGS.limits, ReadLimits(small_rows=2, rows=3)], ids=["small", "large"])
async def test_a_shared_read_goes_to_members_only(world: World, limits: ReadLimits) -> None:
    """All sets of several subscriptions share their statements. Each member gets only its own events."""
    declared = [subscription(f"s{n}", partitions=1, filter=f) for n, (f, _) in enumerate(CASES)]
    relay = await Relay.start(world, declared, settings=replace(SETTINGS, limits=limits))
    some = await relay.claim(relay.keys[1:4])
    writer = world.begin()
    names = insert_all(writer)
    writer.commit()
    delivered = await relay.drain()
    assert delivered.keys() == set(some)
    for key, (_, wanted) in zip(some, CASES[1:4], strict=True):
        assert {names[event.event_id] for event in delivered[key]} == wanted


@pytest.mark.parametrize(("wanted", "expected"), CASES)
async def test_a_subscription_read_alone_gets_the_same(
    world: World, wanted: dict[str, Any], expected: set[str]
) -> None:
    relay = await Relay.start(world, [subscription(filter=wanted)])
    await relay.claim()
    writer = world.begin()
    names = insert_all(writer)
    writer.commit()
    assert {names[event.event_id] for event in await relay.drained()} == expected


async def test_events_that_match_no_subscription_are_skipped(world: World) -> None:
    relay = await Relay.start(world, [subscription(filter={"eventTypes": ["parcel.*"]})])
    await relay.claim()
    write(world, "a", "b")
    result = await relay.tick()
    assert not result.opened
    assert {lease.key for lease in result.advanced} == set(relay.keys)
    assert (await relay.tick()).quiet


async def test_latest_begins_with_events_that_are_not_committed_yet(world: World) -> None:
    write(world, "a")
    slow = world.begin(early=True)
    late = slow.insert("order.placed", key="a")
    relay = await Relay.start(world, [subscription(start={"from": "Latest"})])
    await relay.claim()
    slow.commit()
    assert [event.event_id for event in await relay.drained()] == [late]


async def test_a_position_or_a_time_to_begin_at(world: World) -> None:
    everything = await Relay.start(world, [subscription("all")], "first")
    await everything.claim()
    write(world, "a", "b", "c")
    first, second, third = await everything.drained()
    at = {"from": "Position", "position": second.id}
    since = {"from": "Time", "time": second.created_at}
    relay = await Relay.start(world, [subscription("p", start=at), subscription("t", start=since)], "second")
    await relay.claim()
    found = await relay.drain()
    by_name = {
        name: sorted(
            e.id for key, events in found.items() if relay.subscriptions[key.subscription].name == name for e in events
        )
        for name in ("shop/p", "shop/t")
    }
    assert by_name["shop/p"] == [second.id, third.id]
    assert set(by_name["shop/t"]) - {first.id} == {second.id, third.id}, "times may be equal"


async def test_pausing_is_seen_at_the_next_heartbeat_and_a_changed_manifest_wins(world: World) -> None:
    relay = await Relay.start(world, [subscription()])
    (number,) = relay.subscriptions
    assert not (await relay.store.beat()).subscriptions[number].paused
    world.pause(number, True)
    assert (await relay.store.beat()).subscriptions[number].paused
    await relay.store.declare([subscription()])
    assert (await relay.store.beat()).subscriptions[number].paused, "the same manifest does not undo it"
    await relay.store.declare([subscription(state="Paused")])
    await relay.store.declare([subscription(state="Running")])
    assert not (await relay.store.beat()).subscriptions[number].paused
