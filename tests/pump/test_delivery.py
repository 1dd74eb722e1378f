"""How a relay delivers: order, attempts, parked keys, outages, dead letters, stops. One story per test."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mailboat.errors import EventRefused
from mailboat.events import Outgoing
from mailboat.outbox.store import CursorKey
from mailboat.outbox.windows import ReadLimits
from mailboat.pump.points import Point
from mailboat.pump.retry import Policy
from mailboat.sinks.memory import MemorySink
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, Traits
from pump.fleet import BACKOFF, DEAD_TOPIC, TIMINGS, Fleet, Refusals, header, settings, subscription
from pump.virtual_time import in_virtual_time, until

BLOCK = Policy(3, BACKOFF, dead_letters=False)
CAREFUL = Traits(header_prefix="ce_", stops_behind_failure=False)


def refusing(fleet: Fleet, tells_which: bool = True, **times: int) -> Refusals:
    refusals = Refusals(Counter(times))
    fleet.sink.refuse(refusals, tells_which=tells_which)
    return refusals


def owners(fleet: Fleet) -> Counter[str | None]:
    return Counter(cursor.owner for cursor in fleet.outbox.cursors.values())


def always(event_id: str) -> dict[str, int]:
    return {event_id: 1000}


@in_virtual_time
async def test_events_arrive_in_order_with_their_numbers() -> None:
    fleet = Fleet()
    fleet.start()
    events = [event for n in range(5) for event in fleet.write("a", f"b{n}", None)]
    await fleet.all_settled()
    assert fleet.arrived() == [event.event_id for event in events]
    assert [int(header(m, "mailboat-sequence")) for m in fleet.sink.arrived] == list(range(1, 16))
    assert {header(m, "mailboat-attempt") for m in fleet.sink.arrived} == {"1"}
    await fleet.stop()


@pytest.mark.parametrize("tells_which", [True, False])
@pytest.mark.parametrize("traits", [None, CAREFUL], ids=["overlapped", "one per key"])
@in_virtual_time
async def test_a_poison_event_stops_its_key_only_and_nothing_passes_it(
    tells_which: bool, traits: Traits | None
) -> None:
    fleet = Fleet()
    if traits is not None:
        fleet.sink.traits = traits
    poisoned, other = [], []
    for _ in range(6):
        first, second = fleet.write("a", "b")
        poisoned.append(first.event_id)
        other.append(second.event_id)
    refusals = refusing(fleet, tells_which)
    refusals.times.update(always(poisoned[2]))
    fleet.start()
    await until(lambda: set(other) <= set(fleet.arrived()), "all events of the other key")
    assert [e for e in fleet.arrived() if e in poisoned] == poisoned[:2], "G2: nothing behind it until it is settled"
    await fleet.all_settled()
    assert [e for e in fleet.arrived() if e in poisoned] == poisoned[:2] + poisoned[3:]
    assert [e for e in fleet.arrived() if e in other] == other
    (dead,) = fleet.outbox.dead
    assert (dead.event.event_id, dead.attempts, dead.sequence) == (poisoned[2], 3, 5)
    assert not fleet.outbox.parked
    await fleet.stop()


@in_virtual_time
async def test_an_event_that_is_refused_twice_arrives_at_the_third_attempt_and_before_its_siblings() -> None:
    fleet = Fleet()
    events = [event.event_id for event in fleet.write("a", "a", "a", "b")]
    refusals = refusing(fleet)
    refusals.times[events[0]] = 2
    fleet.start()
    await fleet.all_settled()
    assert fleet.arrived() == [events[3], *events[:3]]
    attempts = {m.event_id: header(m, "mailboat-attempt") for m in fleet.sink.arrived}
    assert attempts == {events[0]: "3", events[1]: "1", events[2]: "1", events[3]: "1"}
    sequences = {m.event_id: int(header(m, "mailboat-sequence")) for m in fleet.sink.arrived}
    assert [sequences[event_id] for event_id in events] == [1, 2, 3, 4]
    await fleet.stop()


@in_virtual_time
async def test_what_can_never_be_sent_is_dead_at_once_and_its_key_goes_on() -> None:
    fleet = Fleet()
    fleet.sink.max_value_bytes = 10
    before = fleet.write("a", "b")
    (large,) = fleet.write("a", payload=b"x" * 11)
    behind = fleet.write("a", "b", "a")
    fleet.start()
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted(event.event_id for event in [*before, *behind])
    (dead,) = fleet.outbox.dead
    assert (dead.event, dead.attempts, dead.failure.reason) == (large, 1, "TooLarge")
    await fleet.stop()


@in_virtual_time
async def test_an_outage_costs_no_attempt_and_delivery_goes_on_by_itself() -> None:
    fleet = Fleet(streams=settings(policy=Policy(1, BACKOFF, dead_letters=True)))
    relay = fleet.start()
    await until(lambda: relay.session is not None and relay.session.owned, "ownership")
    fleet.sink.go_away("no route to host")
    events = [event.event_id for event in fleet.write(*"abcabcabc")]
    await asyncio.sleep(30)
    assert relay.session is not None
    (owned,) = relay.session.owned.values()
    assert owned.pump.counters.away == "no route to host"
    assert not fleet.arrived()
    fleet.sink.come_back()
    await until(lambda: len(fleet.arrived()) == 9, "delivery", within=10)
    await fleet.all_settled()
    assert fleet.arrived() == events
    assert {header(m, "mailboat-attempt") for m in fleet.sink.arrived} == {"1"}
    assert not fleet.outbox.dead
    assert owned.pump.counters.away is None
    await fleet.stop()


@in_virtual_time
async def test_parked_events_wait_for_an_outage_without_losing_an_attempt() -> None:
    fleet = Fleet()
    (event,) = fleet.write("a")
    refusals = refusing(fleet)
    refusals.times[event.event_id] = 1
    fleet.start()
    await until(lambda: fleet.outbox.parked, "parking")
    fleet.sink.go_away()
    await asyncio.sleep(60)
    (row,) = fleet.outbox.parked.values()
    assert row.attempts == 1
    fleet.sink.come_back()
    await fleet.all_settled()
    (message,) = fleet.sink.arrived
    assert header(message, "mailboat-attempt") == "2"
    await fleet.stop()


@in_virtual_time
async def test_block_keeps_the_key_until_a_person_decides_and_other_keys_go_on() -> None:
    fleet = Fleet(streams=settings(policy=BLOCK))
    first, *_ = events = [event.event_id for event in fleet.write("a", "a", "b")]
    refusals = refusing(fleet)
    refusals.times.update(always(first))
    fleet.start()
    await fleet.all_settled()
    (head,) = (row for row in fleet.outbox.parked.values() if row.blocked)
    assert (head.event.event_id, head.attempts) == (first, 3)
    await asyncio.sleep(120)
    assert fleet.arrived() == [events[2]]
    assert refusals.given[first] == 3, "G4: no attempt beyond the limit"
    await fleet.stop()


@in_virtual_time
async def test_a_dead_letter_is_announced_and_one_that_can_not_be_waits() -> None:
    class DeadTopicAway(MemorySink):
        dead_topic_away = True

        async def publish(self, batch: Sequence[Outgoing]) -> Failures:
            if self.dead_topic_away and any(message.topic is not None for message in batch):
                self.go_away("the dead-letter topic is away")
                try:
                    return await super().publish(batch)
                finally:
                    self.come_back()
            return await super().publish(batch)

    fleet = Fleet(dead_topic=True, new_sink=DeadTopicAway)
    poison, behind, other = [event.event_id for event in fleet.write("a", "a", "b")]
    refusals = refusing(fleet)
    refusals.times.update(always(poison))
    fleet.start()
    await until(lambda: any(row.doomed for row in fleet.outbox.parked.values()), "an event that is given up on")
    await asyncio.sleep(60)
    assert fleet.arrived() == [other], "its key does not go on before it is announced"
    assert not fleet.outbox.dead
    assert isinstance(fleet.sink, DeadTopicAway)
    fleet.sink.dead_topic_away = False
    await fleet.all_settled()
    (notice,) = (message for message in fleet.sink.arrived if message.topic == DEAD_TOPIC)
    assert notice.event_id == poison
    assert fleet.arrived() == [other, behind]
    (dead,) = fleet.outbox.dead
    assert dead.attempts == refusals.given[poison] == 3
    await fleet.stop()


@in_virtual_time
async def test_replayed_dead_letters_go_out_marked_and_in_their_own_order() -> None:
    fleet = Fleet()
    first, second, third = [event.event_id for event in fleet.write("a", "a", "a")]
    refusals = refusing(fleet)
    refusals.times.update({first: 1000, second: 1000})
    fleet.start()
    await fleet.all_settled()
    assert fleet.arrived() == [third]
    refusals.times.clear()
    fleet.outbox.replay(list(fleet.outbox.dead))
    await fleet.all_settled()
    assert fleet.arrived() == [third, first, second]
    assert [header(m, "mailboat-replay") for m in fleet.sink.arrived[1:]] == ["true", "true"]
    assert [header(m, "mailboat-sequence") for m in fleet.sink.arrived[1:]] == ["1", "2"]
    await fleet.stop()


@in_virtual_time
async def test_without_ordering_a_failed_event_holds_up_nobody() -> None:
    fleet = Fleet(streams=settings(ordered=False))
    first, *rest = [event.event_id for event in fleet.write(*"aaaaaa")]
    refusals = refusing(fleet)
    refusals.times[first] = 2
    fleet.start()
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted([first, *rest])
    assert fleet.arrived()[-1] == first
    await fleet.stop()


@in_virtual_time
async def test_a_refusal_in_a_later_flight_is_not_overtaken_while_an_earlier_one_is_still_out() -> None:
    """The second batch fails while the first has no answer yet, and only then more is read: it must wait (G2)."""

    class SlowFirst(MemorySink):
        def __init__(self) -> None:
            super().__init__()
            self.first = asyncio.Event()
            self.calls = 0

        async def publish(self, batch: Sequence[Outgoing]) -> Failures:
            self.calls += 1
            if self.calls == 1:
                self.arrived += batch
                await self.first.wait()
                return ALL_DELIVERED
            if self.calls == 2:
                return {0: EventRefused("not this one")}
            return await super().publish(batch)

    fleet = Fleet(streams=settings(batch_size=1), limits=ReadLimits(small_rows=1, rows=2), new_sink=SlowFirst)
    fleet.outbox.latency = lambda: 0.05
    assert isinstance(fleet.sink, SlowFirst)
    events = [event.event_id for event in fleet.write("b", "a", "a", "a")]
    fleet.start()
    await until(lambda: fleet.sink.calls >= 2, "two flights")  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    fleet.sink.first.set()
    await fleet.all_settled()
    assert fleet.arrived() == events
    await fleet.stop()


@in_virtual_time
async def test_a_stop_during_an_outage_settles_the_contiguous_part_only() -> None:
    class HalfAway(MemorySink):
        """Takes the first two messages of its life."""

        async def publish(self, batch: Sequence[Outgoing]) -> Failures:
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
    assert cursor.upto is not None
    assert cursor.released


@in_virtual_time
async def test_an_orderly_stop_finishes_the_batch_in_hand_and_the_next_relay_repeats_nothing() -> None:
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
    await fleet.stop("heir")


@in_virtual_time
async def test_a_killed_relay_is_taken_over_and_duplicates_carry_the_same_numbers() -> None:
    points: list[Point] = []
    fleet = Fleet(passing=points.append)
    events = [event.event_id for event in fleet.write(*"abcdefgh")]
    fleet.start("first")
    fleet.start("second")
    await until(lambda: Point.ANSWERED in points, "the first answer")
    (owner,) = {cursor.owner for cursor in fleet.outbox.cursors.values()}
    assert owner is not None
    await fleet.kill(owner)
    await fleet.all_settled()
    first_arrivals = list(dict.fromkeys(fleet.arrived()))
    assert first_arrivals == events
    numbers = {(m.event_id, header(m, "mailboat-sequence")) for m in fleet.sink.arrived}
    assert len(numbers) == 8
    await fleet.end()


@in_virtual_time
async def test_nothing_is_handed_over_when_the_lease_may_end_before_the_answer() -> None:
    fleet = Fleet(timings=replace(TIMINGS, lease_ttl=0.8), streams=settings(timeout=1.0))
    fleet.write("a")
    fleet.start()
    await asyncio.sleep(20)
    assert fleet.sink.publishes == 0
    await fleet.stop()


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
    await fleet.stop()


@pytest.mark.parametrize("batch_size", [1, 4, 10])
@in_virtual_time
async def test_an_event_that_kills_its_relay_is_found_and_the_others_are_delivered(batch_size: int) -> None:
    class Killer(MemorySink):
        """Whoever hands the poison over dies of it."""

        poison = ""
        victims = 0

        async def publish(self, batch: Sequence[Outgoing]) -> Failures:
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
    await fleet.stop()


@in_virtual_time
async def test_partitions_are_shared_and_shared_anew_when_a_relay_comes_or_goes() -> None:
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
    await fleet.stop("one")


@in_virtual_time
async def test_a_relay_whose_leases_ran_out_under_way_learns_of_it_and_lets_the_heir_work() -> None:
    fleet = Fleet(declared=[subscription(partitions=2)], timings=replace(TIMINGS, lease_ttl=2.0))
    relay = fleet.start("one")
    await until(lambda: relay.session is not None and len(relay.session.owned) == 2, "ownership")
    for key in (CursorKey(1, 0), CursorKey(1, 1)):  # as if another had claimed them while this one slept
        fleet.outbox.cursors[key].owner, fleet.outbox.cursors[key].epoch = "other", f"of-the-other-{key.partition}"
    fleet.write(*"abcdefgh")
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted(row.event.event_id for row in fleet.outbox.rows)
    await fleet.stop("one")


@in_virtual_time
async def test_one_failing_sink_never_slows_another_subscription() -> None:
    fleet = Fleet(declared=[subscription("good", partitions=2), subscription("bad", partitions=2)])
    fleet.sinks["shop/bad"].go_away()
    fleet.start()
    for _ in range(20):
        fleet.write(*"abcdefgh")
        await asyncio.sleep(0.05)
    await until(lambda: len(fleet.arrived("shop/good")) == 160, "the good one's events", within=2)
    assert not fleet.arrived("shop/bad")
    fleet.sinks["shop/bad"].come_back()
    await fleet.all_settled()
    assert len(fleet.arrived("shop/bad")) == 160
    await fleet.stop()


@in_virtual_time
async def test_a_database_that_goes_away_ends_the_session_and_the_next_one_goes_on() -> None:
    fleet = Fleet()
    relay = fleet.start()
    await until(lambda: relay.session is not None and relay.session.owned, "ownership")
    fleet.outbox.away = "the server is restarting"
    await until(lambda: relay.session is None, "the end of the session")
    fleet.write(*"abc")
    await asyncio.sleep(5)
    fleet.outbox.away = None
    await fleet.all_settled()
    assert len(fleet.arrived()) == 3
    await fleet.stop()


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.01, 0.2])
@in_virtual_time
async def test_a_relay_that_is_told_to_stop_while_it_hands_partitions_on_ends(pause: float) -> None:
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
