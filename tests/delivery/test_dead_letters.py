"""Events without attempts left: sent to the dead-letter topic, stored, blocked, replayed. One scenario per test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mailboat.delivery.counters import Totals
from mailboat.errors import EventRefused, SinkUnavailable
from mailboat.model import Message
from mailboat.runtime.relay_status import subscription_status
from mailboat.sinks.protocol import Failures
from mailboat.testing.memory_sink import MemorySink
from support.simulation import DEAD_TOPIC, Fleet, always, refusing, sequence_number, settings, subscription
from support.virtual_time import in_virtual_time, until


@in_virtual_time
async def test_block_holds_the_key_until_a_manual_decision_and_other_keys_continue() -> None:
    fleet = Fleet(streams=settings(dead_letters=False))
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


class DeadTopicAway(MemorySink):
    """Sink whose dead-letter topic answers late and reports that it is unavailable."""

    dead_topic_away = True
    seconds = 0.0
    asked = 0

    async def publish(self, batch: Sequence[Message]) -> Failures:
        if all(message.topic is None for message in batch):
            return await super().publish(batch)
        self.asked += 1
        await asyncio.sleep(self.seconds)
        if self.dead_topic_away:
            return dict.fromkeys(range(len(batch)), SinkUnavailable("no such topic"))
        return await super().publish(batch)


@in_virtual_time
async def test_at_the_limit_of_parked_events_delivery_stops_with_a_condition_until_some_are_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(streams=settings(max_attempts=1, dead_letters=False, batch_size=1, max_parked=3))
    blocked = [event.event_id for event in fleet.write("a", "b", "c")]
    refusing(fleet).times.update(dict.fromkeys(blocked, 1000))
    relay = fleet.start()
    await until(lambda: len(fleet.outbox.parked) == 3, "a full parking lot")
    waiting = [event.event_id for event in fleet.write("d", "e")]
    await asyncio.sleep(60)
    assert not fleet.arrived()
    assert relay.session is not None
    (told,) = (record.message for record in caplog.records if "takes nothing new" in record.message)
    assert told.startswith("Partition 0 has 3 parked events")
    assert subscription_status(fleet.declared[0], relay.session, Totals()).last_error == told
    fleet.outbox.parked.clear()
    await until(lambda: fleet.arrived() == waiting, "delivery to go on", within=6)
    assert subscription_status(fleet.declared[0], relay.session, Totals()).last_error != told
    await fleet.all_settled()


@in_virtual_time
async def test_a_dead_letter_is_announced_and_one_that_can_not_be_waits() -> None:
    fleet = Fleet(dead_topic=True, new_sink=DeadTopicAway)
    poison, behind, other = [event.event_id for event in fleet.write("a", "a", "b")]
    refusals = refusing(fleet)
    refusals.times.update(always(poison))
    fleet.start()
    await until(
        lambda: any(row.pending_dead_letter for row in fleet.outbox.parked.values()), "an event that is given up on"
    )
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


@in_virtual_time
async def test_an_unavailable_dead_letter_topic_is_reported_and_does_not_block_healthy_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(
        declared=[subscription(partitions=2)], streams=settings(max_attempts=1), dead_topic=True, new_sink=DeadTopicAway
    )
    assert isinstance(fleet.sink, DeadTopicAway)
    fleet.sink.seconds = 5.0
    poison, healthy = set[str](), set[str]()
    for number in range(40):
        bad, good = fleet.write(f"bad-{number}", f"good-{number}")
        poison.add(bad.event_id)
        healthy.add(good.event_id)
    refusals = refusing(fleet)
    refusals.times.update(dict.fromkeys(poison, 1000))
    relay = fleet.start()
    await until(lambda: healthy == set(fleet.arrived()), "all healthy keys", within=15)
    await asyncio.sleep(60)
    assert fleet.sink.asked < 15, "one answer stands for all, in both partitions"
    (told,) = (record.message for record in caplog.records if "dead-letter topic takes nothing" in record.message)
    assert "no such topic" in told
    assert relay.session is not None
    status = subscription_status(fleet.declared[0], relay.session, Totals())
    assert status.last_error == told
    assert not fleet.outbox.dead
    fleet.sink.dead_topic_away, fleet.sink.seconds = False, 0.0
    await fleet.all_settled()
    assert {dead.event.event_id for dead in fleet.outbox.dead} == poison
    assert {m.event_id for m in fleet.sink.arrived if m.topic == DEAD_TOPIC} == poison
    assert set(refusals.given.values()) == {1}, "G4"
    assert subscription_status(fleet.declared[0], relay.session, Totals()).last_error != told


@in_virtual_time
async def test_a_stopped_relay_leaves_pending_dead_letters_to_the_next_owner() -> None:
    fleet = Fleet(streams=settings(max_attempts=1, batch_size=20), dead_topic=True, new_sink=DeadTopicAway)
    assert isinstance(fleet.sink, DeadTopicAway)
    fleet.sink.dead_topic_away, fleet.sink.seconds = False, 3.0
    poison = [event.event_id for event in fleet.write(*(f"key-{number}" for number in range(20)))]
    refusing(fleet).times.update(dict.fromkeys(poison, 1000))
    fleet.start()
    await until(lambda: len(fleet.sink.arrived) == 1, "the first announcement")
    async with asyncio.timeout(5):
        await fleet.stop()
    fleet.sink.seconds = 0.0
    fleet.start("heir")
    await until(lambda: len(fleet.outbox.dead) == 20, "all of them to be dead", within=5)
    assert [m.event_id for m in fleet.sink.arrived] == poison


@in_virtual_time
async def test_a_dead_letter_refused_by_its_topic_is_kept_in_the_table_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(dead_topic=True)
    poison, behind = [event.event_id for event in fleet.write("a", "a")]
    fleet.sink.refuse(lambda message: message.event_id == poison)  # on both topics
    fleet.start()
    await fleet.all_settled()
    (dead,) = fleet.outbox.dead
    assert dead.event.event_id == poison
    assert fleet.arrived() == [behind], "its key goes on"
    (told,) = (record.message for record in caplog.records if "dead-letter topic refused it" in record.message)
    assert poison in told


@pytest.mark.parametrize("dead_topic", [False, True])
@in_virtual_time
async def test_headers_that_are_nested_without_end_cost_their_own_event_and_no_relay(dead_topic: bool) -> None:
    fleet = Fleet(dead_topic=dead_topic)
    transaction = fleet.outbox.begin()
    deep = '{"n": ' + "[" * 100_000 + "]" * 100_000 + "}"
    bad = transaction.insert("order.placed", key="a", headers=deep)
    behind = transaction.insert("order.placed", key="a")
    transaction.commit()
    fleet.start()
    await fleet.all_settled()
    assert fleet.arrived() == [behind.event_id]
    (dead,) = fleet.outbox.dead
    assert (dead.event.event_id, dead.attempts, dead.failure.reason) == (bad.event_id, 1, "InvalidHeaders")
    assert [m.event_id for m in fleet.sink.arrived if m.topic == DEAD_TOPIC] == [bad.event_id] * dead_topic


class Stumbling(MemorySink):
    """Sink with a bug in ``refusal`` for one event, optionally also for its dead letter."""

    stumbles_at = ""
    on_dead_topic = False

    def refusal(self, message: Message) -> EventRefused | None:
        if message.event_id == self.stumbles_at and (message.topic is None or self.on_dead_topic):
            raise KeyError(message.value)
        return super().refusal(message)


@pytest.mark.parametrize("on_dead_topic", [False, True])
@pytest.mark.parametrize("parked_before", [False, True])
@in_virtual_time
async def test_an_unexpected_error_costs_only_its_event_and_is_logged_without_the_payload(
    on_dead_topic: bool, parked_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(dead_topic=True, new_sink=Stumbling)
    assert isinstance(fleet.sink, Stumbling)
    fleet.sink.on_dead_topic = on_dead_topic
    bad, behind, other = [event.event_id for event in fleet.write("a", "a", "b", payload=b"4711-0815")]
    if parked_before:
        refusing(fleet).times[bad] = 1
        fleet.start()
        await until(lambda: fleet.outbox.parked, "parking")
        fleet.sink.stumbles_at = bad
    else:
        fleet.sink.stumbles_at = bad
        fleet.start()
    await fleet.all_settled()
    assert sorted(fleet.arrived()) == sorted([behind, other]), "its key goes on"
    (dead,) = fleet.outbox.dead
    assert (dead.event.event_id, dead.failure.reason) == (bad, "CantEncode")
    assert "KeyError" in dead.failure.error
    notices = [m.event_id for m in fleet.sink.arrived if m.topic == DEAD_TOPIC]
    assert notices == ([] if on_dead_topic else [bad])
    told = [record for record in caplog.records if record.exc_info and bad in record.message]
    assert len(told) == 1 + on_dead_topic, "once, and once more where it is in the table only"
    assert "in refusal" in caplog.text, "where it happened"
    assert "4711-0815" not in caplog.text + dead.failure.error


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
    assert [m.headers["mailboat-replay"] for m in fleet.sink.arrived[1:]] == ["true", "true"]
    assert [sequence_number(m) for m in fleet.sink.arrived[1:]] == [1, 2]
