"""Changes of ownership between relays or sessions: stops, kills, rebalancing. One scenario per test."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from mailboat.delivery.stream import Checkpoint
from mailboat.model import Message
from mailboat.sinks.protocol import Failures, Traits
from mailboat.store.outbox_store import CursorKey
from mailboat.testing.memory_sink import MemorySink
from support.simulation import TIMINGS, Fleet, RunningRelay, sequence_number, settings, subscription
from support.virtual_time import in_virtual_time, until


def owners(fleet: Fleet) -> Counter[str | None]:
    return Counter(cursor.owner for cursor in fleet.outbox.cursors.values())


@in_virtual_time
async def test_a_stop_during_an_outage_settles_the_contiguous_part_only() -> None:
    class HalfAway(MemorySink):
        """Sink that takes two messages and is then unavailable."""

        async def publish(self, batch: Sequence[Message]) -> Failures:
            self.go_away()
            failures = dict(await super().publish(batch))
            for index in range(2 - len(self.arrived)):
                self.arrived.append(batch[index])
                failures.pop(index, None)
            return failures

    fleet = Fleet(new_sink=HalfAway)
    events = fleet.write(*"abcd")
    fleet.start()
    await until(lambda: len(fleet.arrived()) == 2, "half of the batch")
    await fleet.stop()
    (cursor,) = fleet.outbox.cursors.values()
    assert (cursor.position, cursor.sequence, cursor.owner) == (events[1].id, 2, None)
    assert cursor.window_snapshot is not None
    assert cursor.released


@in_virtual_time
async def test_an_orderly_stop_finishes_the_batch_in_flight_and_the_next_relay_repeats_nothing() -> None:
    fleet = Fleet()
    fleet.sink.hold_answers()
    fleet.write(*"abcdefghijklmnop")
    fleet.start()
    await until(lambda: fleet.sink.publishes > 0, "the first batch")
    stopping = asyncio.ensure_future(fleet.stop())
    await asyncio.sleep(0.1)
    fleet.sink.let_go()
    await stopping
    handed = len(fleet.arrived())
    assert 0 < handed < 16
    fleet.start("heir")
    await fleet.all_settled()
    assert len(fleet.arrived()) == len(set(fleet.arrived())) == 16


@in_virtual_time
async def test_a_killed_relay_is_taken_over_and_duplicates_carry_the_same_numbers() -> None:
    points: list[Checkpoint] = []
    fleet = Fleet(on_checkpoint=points.append)
    events = [event.event_id for event in fleet.write(*"abcdefgh")]
    fleet.start("first")
    fleet.start("second")
    await until(lambda: Checkpoint.ANSWERED in points, "the first answer")
    (owner,) = {cursor.owner for cursor in fleet.outbox.cursors.values()}
    assert owner is not None
    await fleet.kill(owner)
    await fleet.all_settled()
    first_arrivals = list(dict.fromkeys(fleet.arrived()))
    assert first_arrivals == events
    numbers = {(m.event_id, sequence_number(m)) for m in fleet.sink.arrived}
    assert len(numbers) == 8
    await fleet.end()


@in_virtual_time
async def test_a_relay_that_cannot_renew_its_leases_gives_up_its_batch_before_another_may_take_over() -> None:
    fleet = Fleet(streams=settings(timeout=60.0))  # a batch may take longer than a lease while heartbeats arrive
    fleet.sink.hold_answers()
    fleet.write("a")
    relay = fleet.start()
    await until(lambda: fleet.sink.publishes > 0, "a batch on its way")
    await asyncio.sleep(3 * TIMINGS.lease_ttl)
    assert relay.session is not None
    (before,) = fleet.outbox.relays.values()
    fleet.outbox.latency = lambda: 100.0
    await until(lambda: relay.session is None, "the end of the session")
    assert fleet.outbox.now() - before.beat_at < timedelta(seconds=TIMINGS.lease_ttl)
    fleet.sink.let_go()
    assert fleet.arrived() == []
    await fleet.end()


@in_virtual_time
async def test_heartbeats_continue_while_a_relay_drains() -> None:
    timings = replace(TIMINGS, drain_within=4 * TIMINGS.lease_ttl)
    fleet = Fleet(timings=timings, streams=settings(timeout=60.0))
    fleet.sink.hold_answers()
    fleet.write(*"abc")
    fleet.start("one")
    await until(lambda: fleet.sink.publishes > 0, "a batch on its way")
    fleet.start("two")
    stopping = asyncio.ensure_future(fleet.stop("one"))
    await asyncio.sleep(2 * TIMINGS.lease_ttl)
    assert owners(fleet) == {"one": 1}, "taken over from a relay that only takes its time"
    fleet.sink.let_go()
    await stopping
    await fleet.all_settled()
    assert len(fleet.arrived()) == 3


@in_virtual_time
async def test_a_paused_subscription_sends_nothing_until_it_is_resumed() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.write("a")
    await fleet.all_settled()
    fleet.outbox.pause(1, True)
    await asyncio.sleep(2)
    fleet.write("a", "b")
    await asyncio.sleep(30)
    assert len(fleet.arrived()) == 1
    fleet.outbox.pause(1, False)
    await fleet.all_settled()
    assert len(fleet.arrived()) == 3


@pytest.mark.parametrize("batch_size", [1, 4, 10])
@in_virtual_time
async def test_an_event_that_kills_its_relay_is_found_and_the_others_are_delivered(batch_size: int) -> None:
    class Killer(MemorySink):
        """Sink that kills the relay that publishes the poison."""

        poison = ""
        victims = 0

        async def publish(self, batch: Sequence[Message]) -> Failures:
            if any(message.event_id == self.poison and message.topic is None for message in batch):
                self.victims += 1
                dying = next(iter(fleet.relays.values()))
                dying.task.cancel()
                await asyncio.sleep(3600)
            return await super().publish(batch)

    fleet = Fleet(streams=settings(batch_size=batch_size), new_sink=Killer)
    assert isinstance(fleet.sink, Killer)
    events = [event.event_id for event in fleet.write(*"abcdefghijklmnopqrst")]
    fleet.sink.poison = events[13]
    for _ in range(60):
        fleet.start()
        settled = asyncio.ensure_future(fleet.all_settled())
        await asyncio.wait({settled, fleet.relays["relay"].task}, return_when=asyncio.FIRST_COMPLETED)
        if settled.done():
            break
        settled.cancel()
        await fleet.kill()
    await fleet.all_settled()
    assert set(fleet.arrived()) == set(events) - {events[13]}
    (dead,) = fleet.outbox.dead
    assert (dead.event.event_id, dead.attempts, dead.failure.reason) == (events[13], 3, "RelayDied")
    assert fleet.sink.victims <= 12, "one event may not take a whole fleet with it"
    await fleet.end()


class OpensAnyway(MemorySink):
    """Sink that connects with the first batch."""

    async def open(self) -> None: ...


def _owns_something(relay: RunningRelay) -> bool:
    return relay.session is not None and bool(relay.session.owned)


@pytest.mark.parametrize("new_sink", [MemorySink, OpensAnyway])
@in_virtual_time
async def test_relays_that_die_while_the_sink_is_unavailable_cost_no_event_its_life(new_sink: type[MemorySink]) -> None:
    fleet = Fleet(new_sink=new_sink)
    events = [event.event_id for event in fleet.write(*"abcabc")]
    fleet.sink.go_away()
    for _ in range(8):
        relay = fleet.start()
        await until(partial(_owns_something, relay), "ownership")
        await asyncio.sleep(10)
        await fleet.kill()
    fleet.sink.come_back()
    fleet.start()
    await fleet.all_settled()
    assert (fleet.arrived(), fleet.outbox.dead) == (events, [])


@in_virtual_time
async def test_a_suspect_waits_for_an_outage_without_losing_an_attempt() -> None:
    fleet = Fleet()
    (event,) = fleet.write("a")
    for _ in range(5):
        fleet.sink.hold_answers()
        relay = fleet.start()
        await until(lambda: fleet.sink.publishes > 0 or fleet.outbox.parked, "the event to be tried")
        fleet.sink.publishes = 0
        if fleet.outbox.parked:
            break
        await fleet.kill()
    (row,) = fleet.outbox.parked.values()
    assert (row.suspect, row.attempts) == (True, 1)
    fleet.sink.let_go()
    fleet.sink.go_away()
    await asyncio.sleep(120)
    assert row.attempts == 2, "the one that is to be made next"
    assert not relay.task.done()
    fleet.sink.come_back()
    await fleet.all_settled()
    assert fleet.arrived() == [event.event_id]


@in_virtual_time
async def test_partitions_are_shared_and_rebalanced_when_a_relay_joins_or_leaves() -> None:
    fleet = Fleet(declared=[subscription(partitions=6)])

    fleet.start("one")
    await until(lambda: owners(fleet) == {"one": 6}, "all partitions")
    fleet.start("two")
    await until(lambda: owners(fleet) == {"one": 3, "two": 3}, "an equal share", within=5)
    fleet.start("three")
    await until(lambda: owners(fleet) == {"one": 2, "two": 2, "three": 2}, "a share for the third", within=5)
    await fleet.kill("two")
    await until(lambda: owners(fleet) == {"one": 3, "three": 3}, "a take-over", within=5)
    await fleet.stop("one")
    await until(lambda: owners(fleet) == {"three": 6}, "a hand-over", within=3)
    await fleet.stop("three")
    assert owners(fleet) == {None: 6}


@in_virtual_time
async def test_an_assignment_from_outside_goes_first_while_its_relay_lives() -> None:
    fleet = Fleet(declared=[subscription(partitions=4)])
    fleet.start("one")
    fleet.start("two")
    await until(lambda: owners(fleet).keys() == {"one", "two"}, "owners")
    fleet.outbox.assign(1, dict.fromkeys(range(4), "two"))
    await until(lambda: owners(fleet) == {"two": 4}, "the assignment to be followed")
    await fleet.kill("two")
    await until(lambda: owners(fleet) == {"one": 4}, "delivery without it")


@in_virtual_time
async def test_a_relay_whose_leases_expired_detects_it_and_does_not_disturb_the_next_owner() -> None:
    fleet = Fleet(declared=[subscription(partitions=2)], timings=replace(TIMINGS, lease_ttl=2.0))
    relay = fleet.start("one")
    await until(lambda: relay.session is not None and len(relay.session.owned) == 2, "ownership")
    for key in (CursorKey(1, 0), CursorKey(1, 1)):  # as if another relay had claimed them while this one was suspended
        fleet.outbox.cursors[key].owner, fleet.outbox.cursors[key].epoch = "other", f"of-the-other-{key.partition}"
    fleet.write(*"abcdefgh")
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted(row.event.event_id for row in fleet.outbox.rows)


@in_virtual_time
async def test_a_lost_database_ends_the_session_and_the_next_session_continues() -> None:
    fleet = Fleet()
    relay = await fleet.started()
    fleet.outbox.away = "the server is restarting"
    await until(lambda: relay.session is None, "the end of the session")
    fleet.write(*"abc")
    await asyncio.sleep(5)
    fleet.outbox.away = None
    await fleet.all_settled()
    assert len(fleet.arrived()) == 3


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.01, 0.2])
@in_virtual_time
async def test_a_relay_that_is_stopped_while_it_releases_partitions_ends(pause: float) -> None:
    fleet = Fleet(declared=[subscription(partitions=8)])
    fleet.outbox.latency = lambda: 0.003
    fleet.start("one")
    await until(lambda: owners(fleet) == {"one": 8}, "owners")
    fleet.write(*"abcdefgh")
    fleet.start("two")
    await until(lambda: owners(fleet)["one"] < 8, "the first hand-over")
    await asyncio.sleep(pause)
    async with asyncio.timeout(30):
        await fleet.stop("one")
    await fleet.all_settled()
    await fleet.stop("two")
    assert len(set(fleet.arrived())) == 8


@in_virtual_time
async def test_the_log_names_relays_that_joined_or_left_and_partitions_taken_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "mailboat.runtime.session")
    fleet = Fleet([subscription(partitions=2)])
    first = fleet.start("first")
    await until(lambda: first.session is not None and len(first.session.owned) == 2, "the first to own all")
    second = fleet.start("second")
    await until(lambda: second.session is not None and len(second.session.owned) == 1, "a share", within=120)
    await fleet.kill("second")
    await until(lambda: first.session is not None and len(first.session.owned) == 2, "the takeover", within=120)
    told = [record for record in caplog.records if record.message.startswith(("Relay ", "Partitions "))]
    peers = [(each.message, vars(each)["id"]) for each in told if each.message.startswith("Relay ")]
    assert sorted(peers[:2]) == [("Relay joined", "first"), ("Relay joined", "second")]  # one in the log of each relay
    assert peers[2:] == [("Relay left", "second")]
    takeover = told[-1]
    assert takeover.message == "Partitions taken over from a relay that is gone"
    assert (vars(takeover)["subscription"], vars(takeover)["from"]) == ("shop/orders", "second")
    await fleet.end()


@in_virtual_time
async def test_a_relay_renews_its_leases_while_a_snapshot_is_held_and_repeats_nothing() -> None:
    fleet = Fleet(
        declared=[subscription(partitions=2)],
        timings=replace(TIMINGS, renew_after=3),
        oldest_snapshot=timedelta(hours=1),
    )
    fleet.start()
    epochs = set()
    for _ in range(40):
        fleet.write(*"abcdefgh")
        await asyncio.sleep(0.2)
        epochs |= {cursor.epoch for cursor in fleet.outbox.cursors.values()}
    await fleet.all_settled()
    assert len(fleet.arrived()) == len(set(fleet.arrived())) == 320
    assert len(epochs) > 8, "leases were not renewed"
    await fleet.stop()
    assert all(cursor.owner is None and cursor.released for cursor in fleet.outbox.cursors.values())


class Calls(MemorySink):
    """Sink that counts the calls of ``publish``, also those that are cancelled before they send."""

    calls = 0

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        self.calls += 1
        return super().publish(batch)


@in_virtual_time
async def test_a_result_that_arrives_with_the_loss_of_the_lease_starts_no_other_batch() -> None:
    """G5: the worker is cancelled a moment after the loss."""
    fleet = Fleet(declared=[subscription(partitions=1)], streams=settings(batch_size=1), new_sink=Calls)
    assert isinstance(fleet.sink, Calls)
    fleet.sink.traits = Traits(header_prefix="ce_", stops_behind_failure=False)
    relay = await fleet.started()
    assert relay.session is not None
    await asyncio.sleep(1)
    fleet.sink.hold_answers()
    fleet.write("a", "a")
    await until(lambda: fleet.sink.publishes == 1, "the first batch to be in flight")
    ((key, owned),) = relay.session.owned.items()
    before = replace(fleet.outbox.cursors[key])
    fleet.sink.let_go()
    while not fleet.sink.arrived:  # noqa: ASYNC110 - to the step before the callbacks of the result
        await asyncio.sleep(0)
    relay.session.lease_lost(key)
    await asyncio.wait({owned.task})
    assert owned.task.cancelled()
    assert fleet.sink.calls == 1
    assert fleet.outbox.cursors[key] == before
