"""The contract of ``mailboat.sinks.protocol``, tested on every sink."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from mailboat.errors import EventRefused, SinkUnavailable, Undecided
from mailboat.model import Message
from mailboat.sinks.protocol import Failures
from support.sink_backends import POISON, Backend, Opened, Received, message, on_backends, publish_until_delivered
from support.wait import await_until


def values(received: Iterable[Received], key: str | None = None) -> list[bytes | None]:
    return [item.value for item in received if key is None or item.key == key]


def numbers(received: Iterable[Received], key: str) -> list[int]:
    return [int(item.value) for item in received if item.key == key and item.value is not None and item.value.isdigit()]


@on_backends()
async def test_a_batch_arrives_complete_and_each_key_in_order(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    batch = [message(number, key=f"key-{number % 7}") for number in range(500)]

    assert await sink.publish(batch) == {}

    received = await backend.receive(500)
    assert len(received) == 500
    for key in range(7):
        assert numbers(received, f"key-{key}") == list(range(key, 500, 7))


@on_backends()
async def test_headers_arrive_unchanged(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    await sink.publish([message(1, ce_type="order.created", note="grüße ✓", empty="")])

    (received,) = await backend.receive(1)
    assert received.headers == {"event_id": "event-1", "ce_type": "order.created", "note": "grüße ✓", "empty": ""}


@on_backends()
async def test_a_tombstone_arrives_without_a_value(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    assert await sink.publish([Message("event-1", "k", None, {"event_id": "event-1"})]) == {}

    (received,) = await backend.receive(1)
    assert received.value == (None if backend.features.keeps_null_values else b"")


@on_backends()
async def test_a_value_may_be_any_bytes(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    binary = bytes(range(256))

    assert await sink.publish([message(1, value=binary)]) == {}

    assert values(await backend.receive(1)) == [binary]


@on_backends()
async def test_a_key_may_be_any_text_or_none(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    keys = ["straße", "鍵", "🗝", "a b/c", None]

    assert await sink.publish([message(number, key=key) for number, key in enumerate(keys)]) == {}

    assert {item.key for item in await backend.receive(len(keys))} == set(keys)


@on_backends()
async def test_an_empty_batch_publishes_nothing(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    assert await sink.publish([]) == {}
    assert await sink.publish([message(1)]) == {}

    assert len(await backend.receive(1)) == 1


@on_backends()
async def test_a_batch_larger_than_any_request_is_split_and_keeps_its_order(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    padding = "." * 900
    batch = [message(number, key="hot" if number % 2 else None, a=padding, b=padding) for number in range(8_000)]

    assert await sink.publish(batch) == {}

    received = await backend.receive(8_000)
    assert len(received) == 8_000
    assert numbers(received, "hot") == list(range(1, 8_000, 2))


@on_backends()
async def test_overlapping_calls_publish_in_the_order_of_the_calls(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    batches = [
        [message(number, key=f"key-{number % 3}") for number in range(first, first + 50)]
        for first in range(0, 1000, 50)
    ]

    answers = await asyncio.gather(*(sink.publish(batch) for batch in batches))

    assert all(answer == {} for answer in answers)
    received = await backend.receive(1000)
    for key in range(3):
        assert numbers(received, f"key-{key}") == list(range(key, 1000, 3))


@on_backends("too_large")
async def test_a_message_above_the_size_limit_is_refused_before_publishing(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    refusal = sink.refusal(message(1, value=b"." * backend.features.too_large))

    assert isinstance(refusal, EventRefused)
    assert refusal.reason == "TooLarge"
    assert not refusal.retryable
    assert str(backend.features.too_large)[:3] in str(refusal)
    assert sink.refusal(message(2, value=b"." * 900_000)) is None
    assert await sink.publish([message(2, value=b"." * 900_000)]) == {}


@on_backends("refuses_at_the_destination")
async def test_a_refused_batch_of_one_returns_event_refused(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    backend.refuse_poison()

    answer = await sink.publish([message(1, value=POISON)])

    assert [type(error) for error in answer.values()] == [EventRefused]
    assert await sink.publish([message(2)]) == {}
    assert values(await backend.receive(1)) == [b"2"]


@on_backends("refuses_at_the_destination")
@pytest.mark.parametrize("poisoned", [0, 3])
async def test_nothing_of_a_key_arrives_behind_its_refused_message(
    backend: Backend, opened: Opened, poisoned: int
) -> None:
    """G2. The first message of a producer is a special case: see ``mailboat.sinks.kafka.producer``."""
    # Small Kafka batches, so that messages after the refused one are in flight.
    sink = await opened(backend, config={"batch.num.messages": "3", "linger.ms": "20"})
    backend.refuse_poison()
    stream = [message(number, value=POISON if number == poisoned else None) for number in range(60)]
    batches = [stream[first : first + 6] for first in range(0, 60, 6)]

    answers = await asyncio.gather(*(sink.publish(batch) for batch in batches))

    delivered = _delivered(batches, answers)
    assert POISON not in [item.value for item in delivered]
    received = await backend.receive(len(delivered))
    assert values(received) == [item.value for item in delivered]
    assert numbers(received, "k") == list(range(len(received))), "a message passed the refused one"
    assert len(received) <= poisoned

    # As a partition worker continues: one message at a time, and past the refused one once it is settled.
    for item in stream[len(received) :]:
        answer = await sink.publish([item])
        if item.value == POISON:
            assert isinstance(answer[0], EventRefused)
        else:
            assert answer == {}
    assert numbers(await backend.receive(59), "k") == [number for number in range(60) if number != poisoned]


@on_backends("refuses_at_the_destination")
async def test_a_key_is_unblocked_when_all_its_calls_have_returned(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    backend.refuse_poison()

    answers = await asyncio.gather(
        sink.publish([message(1, value=POISON)]),
        sink.publish([message(2), message(3, key="other")]),
    )
    assert isinstance(answers[0][0], EventRefused)
    assert isinstance(answers[1].get(0), Undecided)

    await publish_until_delivered(sink, message(4))


@on_backends("refuses_at_the_destination")
async def test_a_refused_batch_of_one_returns_event_refused_beside_other_traffic(
    backend: Backend, opened: Opened
) -> None:
    sink = await opened(backend)
    backend.refuse_poison()
    busy = True

    async def traffic(lane: int) -> None:
        number = 0
        while busy:
            await sink.publish([message(number + index, key=f"lane-{lane}") for index in range(20)])
            number += 20

    lanes = [asyncio.create_task(traffic(lane)) for lane in range(4)]
    answers = [await sink.publish([message(number, value=POISON)]) for number in range(5)]
    busy = False
    await asyncio.gather(*lanes)

    assert [type(answer[0]) for answer in answers] == [EventRefused] * 5


@on_backends("can_be_killed")
async def test_a_killed_broker_costs_no_attempt_and_delivery_continues_after_its_restart(
    backend: Backend, opened: Opened
) -> None:
    sink = await opened(backend, timeout=10)
    await publish_until_delivered(sink, message(0))
    backend.go_away()

    answer = await sink.publish([message(1), message(2, key="other")])

    assert [type(error) for error in answer.values()] == [SinkUnavailable] * 2
    backend.come_back()
    # Messages whose call failed do not arrive later.
    await publish_until_delivered(sink, message(3))
    # Message 3 may be there twice, if its first acknowledgement was late.
    assert list(dict.fromkeys(values(await backend.receive(2), "k"))) == [b"0", b"3"]
    assert values(await backend.received(), "other") == []


@on_backends("can_be_killed")
async def test_a_broker_that_accepts_and_never_answers_times_out(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend, timeout=10)
    await publish_until_delivered(sink, message(0))
    backend.freeze()

    answers = await asyncio.gather(
        sink.publish([message(number) for number in range(1, 50)]),
        sink.publish([message(number) for number in range(50, 99)]),
    )

    assert all(len(answer) == 49 for answer in answers)
    assert all(isinstance(error, SinkUnavailable | Undecided) for answer in answers for error in answer.values())
    assert isinstance(answers[0][0], SinkUnavailable)
    backend.come_back()
    await publish_until_delivered(sink, *(message(number) for number in range(1, 99)))
    # Messages in flight may arrive twice; first arrivals must be in order.
    received = numbers(await backend.receive(99), "k")
    assert list(dict.fromkeys(received)) == list(range(99))


@on_backends("can_be_killed")
async def test_a_cancelled_call_purges_unsent_messages_and_unblocks_its_key(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend, timeout=20)
    assert await sink.publish([message(0)]) == {}
    backend.freeze()
    padding = "." * 900
    batch = [message(number, a=padding, b=padding) for number in range(1, 6_000)]
    publishing = asyncio.create_task(sink.publish(batch))
    await asyncio.sleep(0)

    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing

    backend.come_back()
    await publish_until_delivered(sink, message(6_000))
    received = numbers(await backend.receive(2), "k")
    assert received[-1] == 6_000
    # Messages in flight may arrive, the others may not.
    assert received[:-1] == list(range(len(received) - 1))
    assert len(received) < 5_000


@on_backends()
async def test_close_ends_pending_calls_and_is_idempotent(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    if backend.features.can_be_killed:
        backend.freeze()
        publishing = asyncio.create_task(sink.publish([message(1)]))
        await asyncio.sleep(0)
        await sink.close()
        answer = await publishing
        assert isinstance(answer[0], SinkUnavailable)

    await sink.close()
    await sink.close()

    assert isinstance((await sink.publish([message(2)]))[0], SinkUnavailable)


@on_backends("has_topics")
async def test_a_missing_topic_is_named_with_the_remedy(backend: Backend, opened: Opened) -> None:
    with pytest.raises(SinkUnavailable, match=r"no-such-topic does not exist on .*: create it, or correct spec\.sink"):
        await opened(backend, topic="no-such-topic", timeout=10)


@on_backends("can_be_killed")
async def test_a_sink_that_failed_to_open_opens_later(backend: Backend, opened: Opened) -> None:
    sink = backend.sink(timeout=5)
    backend.go_away()
    with pytest.raises(SinkUnavailable):
        await sink.open()

    backend.come_back()

    async def opens() -> bool:
        try:
            await sink.open()
        except SinkUnavailable:
            return False
        return True

    is_open: bool = await await_until(opens, what="the sink to open")
    assert is_open
    await publish_until_delivered(sink, message(1))
    await sink.close()


def _delivered(batches: Sequence[Sequence[Message]], answers: Sequence[Failures]) -> list[Message]:
    return [
        item
        for batch, answer in zip(batches, answers, strict=True)
        for index, item in enumerate(batch)
        if index not in answer
    ]
