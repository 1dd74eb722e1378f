"""Repartitioning of a live subscription: 4 partitions, then 16, then 3, in every state of its sink.

No event is lost, and each key keeps its order. If no batch was in flight, no event is delivered twice.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import LiteralString

import pytest

from mailboat.delivery.rebalance import decide
from mailboat.runtime.relay import Relay
from mailboat.store.outbox_store import CursorKey, Membership, PartitionOwner, RelayPeer
from mailboat_devservers.postgres import Database
from support import admin_actions
from support.inprocess_relay import STAGED, Load, StagedSink, serving, status_of
from support.ledger import Written, check_delivery
from support.manifests import Manifest
from support.relay_processes import outbox_relay, subscription
from support.wait import await_until

Stage = dict[str, StagedSink]

KEYS = 40


def _manifests(outbox: Database, partitions: int) -> tuple[Manifest, Manifest]:
    backoff = {"initial": "50ms", "max": "200ms"}
    delivery = {"timeout": "5s", "batchSize": 50, "backoff": backoff, "maxAttempts": 1000}
    return outbox_relay(outbox.url), subscription("orders", STAGED, partitions=partitions, delivery=delivery)


def _layout(outbox: Database) -> tuple[int, int]:
    [(partitions, cursors)] = outbox.execute(
        "select s.partitions, count(*)"
        " from mailboat.subscriptions s join mailboat.cursors c on c.subscription_id = s.id group by s.id"
    )
    return partitions, cursors


async def _owns(relay: Relay, *, at_least: int) -> None:
    await await_until(lambda: len(status_of(relay, "orders").owned) >= at_least, what="partitions")


async def _all_arrived(stage: Stage, committed: dict[str, Written]) -> None:
    await await_until(
        lambda: len({message.event_id for message in stage["orders"].arrived}) >= len(committed),
        timeout=60,
        what="all events to arrive",
    )


async def test_successive_relays_repartition_without_a_loss_or_a_duplicate(outbox: Database, stage: Stage) -> None:
    committed: dict[str, Written] = {}
    load = Load(outbox.url, KEYS, committed)
    with load.flowing():
        for partitions in (4, 16, 3):
            async with serving(*_manifests(outbox, partitions)) as relay:
                await _owns(relay, at_least=1)  # without this wait the relay may stop before it has repartitioned
                await load.goes_on()
            assert _layout(outbox) == (partitions, partitions)
    async with serving(*_manifests(outbox, 3)):
        await _all_arrived(stage, committed)
    check_delivery(committed, (), stage["orders"].arrivals)


async def test_a_running_relay_follows_a_new_layout_under_load(outbox: Database, stage: Stage) -> None:
    committed: dict[str, Written] = {}
    load = Load(outbox.url, KEYS, committed)
    async with AsyncExitStack() as relays:
        with load.flowing():
            for number, partitions in enumerate((4, 16, 3)):
                relay = await relays.enter_async_context(
                    serving(*_manifests(outbox, partitions), relay=f"relay-{number}")
                )
                await _owns(relay, at_least=1)
                await load.goes_on()
                assert _layout(outbox) == (partitions, partitions)
        await _all_arrived(stage, committed)
        await await_until(lambda: status_of(relay, "orders").lag == 0, what="everything to be settled")
    arrivals = stage["orders"].arrivals
    unique = {arrival.event_id: arrival for arrival in reversed(arrivals)}
    again = len(arrivals) - len(unique)
    # Batches of the old owners in flight at the loss of their cursors are sent again, and no other events.
    assert again <= 2 * 16 * 3 * 50
    first = [arrival for arrival in arrivals if unique.pop(arrival.event_id, None) is not None]
    check_delivery(committed, (), first, gapless=False)


@pytest.mark.verify
@pytest.mark.parametrize("trouble", ["paused", "away", "parked"])
async def test_an_unavailable_sink_does_not_delay_a_repartition(outbox: Database, stage: Stage, trouble: str) -> None:
    committed: dict[str, Written] = {}
    load = Load(outbox.url, KEYS, committed)
    refused = {f"key {n}" for n in range(0, KEYS, 4)}
    async with serving(*_manifests(outbox, 4)) as relay:
        load.write_some()
        await _all_arrived(stage, committed)
        sink = stage["orders"]
        if trouble == "paused":
            outbox.execute("update mailboat.subscriptions set state = 'Paused'")
            await await_until(lambda: status_of(relay, "orders").state == "Paused", what="the pause")
        elif trouble == "away":
            sink.go_away()
        else:
            sink.refuse(lambda message: message.key in refused)
        for _ in range(5):
            load.write_some()
        if trouble == "parked":
            await await_until(lambda: _parked(outbox) == 5 * len(refused), what="the parked events")
    for partitions in (16, 3):
        async with serving(*_manifests(outbox, partitions)) as relay:
            await _owns(relay, at_least=partitions)
            assert _layout(outbox) == (partitions, partitions)
            load.write_some()
            if trouble == "parked":
                await await_until(
                    lambda: _parked(outbox) == (len(committed) // KEYS - 1) * len(refused), timeout=20, what="parked"
                )
            else:
                await asyncio.sleep(0)
    load.write_some()
    if trouble == "paused":
        outbox.execute("update mailboat.subscriptions set state = 'Running'")
    sink.come_back()
    sink.refuse(None)
    async with serving(*_manifests(outbox, 3)) as relay:
        await _all_arrived(stage, committed)
        await await_until(lambda: status_of(relay, "orders").parked == 0, what="the parking lot to be empty")
    assert _parked(outbox) == 0
    # Events parked under one layout and delivered under another keep their old sequence.
    check_delivery(committed, (), sink.arrivals)


@pytest.mark.parametrize("died", ["by itself", "by hand"])
async def test_a_dead_letter_that_is_replayed_under_another_layout_has_its_own_number(
    each_outbox: Database, stage: Stage, died: str
) -> None:
    outbox, committed = each_outbox, dict[str, Written]()
    load = Load(outbox.url, KEYS, committed)
    attempts = 1 if died == "by itself" else 1000
    relay, orders = _manifests(outbox, 4)
    orders["spec"]["delivery"] |= {"maxAttempts": attempts}
    async with serving(relay, orders):
        await await_until(lambda: "orders" in stage, what="the sink")
        sink = stage["orders"]
        sink.refuse(lambda message: message.key == "key 7")
        for _ in range(3):
            load.write_some()
        table: LiteralString = "dead_letters" if died == "by itself" else "parked"
        await await_until(lambda: _count(outbox, table) == 3, what=f"three events in {table}")
        await await_until(lambda: len(sink.arrived) == 3 * (KEYS - 1), what="all others")
    if died == "by hand":
        assert await admin_actions.drop(outbox) == 3
    sink.refuse(None)
    relay, orders = _manifests(outbox, 16)
    async with serving(relay, orders):
        load.write_some()
        await await_until(lambda: len(sink.arrived) == 3 * (KEYS - 1) + KEYS, what="all but the dead")
        assert await admin_actions.replay(outbox) == 3
        await await_until(lambda: len(sink.arrived) == 4 * KEYS, what="the replay")
    dead = [arrival for arrival in sink.arrivals[-3:] if arrival.key == "key 7"]
    assert [arrival.generation for arrival in dead] == [1, 1, 1]
    # The replayed events come first, as if they had not died: their sequences are those of a delivery without failures.
    check_delivery(committed, (), dead + [arrival for arrival in sink.arrivals if arrival not in dead])


def _parked(outbox: Database) -> int:
    return _count(outbox, "parked")


def _count(outbox: Database, table: LiteralString) -> int:
    [(count,)] = outbox.execute(f"select count(*) from mailboat.{table}")
    return int(count)


def test_cursors_of_an_earlier_session_are_claimed_again_and_released() -> None:
    """Claim and release of a partition that an earlier session of the relay still owns.

    The reconnected relay is alive, so no other relay may claim its partitions. Only the relay itself can release them.
    """
    held = CursorKey(1, 0)
    peers = tuple(RelayPeer(name, frozenset({1}), alive=True) for name in ("relay-1", "relay-2"))
    membership = Membership(peers, (PartitionOwner(held, owner="relay-1", assigned_to="relay-2"),), {})
    assert decide("relay-1", membership, frozenset(), {}, now=0.0, grace=10.0).claim == {held}
    assert decide("relay-1", membership, frozenset({held}), {}, now=0.0, grace=10.0).release == {held}
    assert decide("relay-2", membership, frozenset(), {}, now=100.0, grace=10.0).claim == set()
