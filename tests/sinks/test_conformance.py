"""What every sink must do: the contract of ``mailboat.sinks.protocol``, on every destination there is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from mailboat.errors import EventRefused, SinkUnavailable, Undecided
from mailboat.model import Message
from mailboat.sinks.protocol import Failures
from support.sink_backends import POISON, Backend, Opened, Received, message, on_all_that, until_it_arrives
from support.wait import await_until


def values(received: Iterable[Received], key: str | None = None) -> list[bytes | None]:
    return [item.value for item in received if key is None or item.key == key]


def numbers(received: Iterable[Received], key: str) -> list[int]:
    return [int(item.value) for item in received if item.key == key and item.value is not None and item.value.isdigit()]


@on_all_that()
async def test_a_batch_arrives_whole_and_each_key_in_order(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    batch = [message(number, key=f"key-{number % 7}") for number in range(500)]

    assert await sink.publish(batch) == {}

    received = await backend.receive(500)
    assert len(received) == 500
    for key in range(7):
        assert numbers(received, f"key-{key}") == list(range(key, 500, 7))


@on_all_that()
async def test_headers_arrive_as_they_were(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    await sink.publish([message(1, ce_type="order.created", note="grüße ✓", empty="")])

    (received,) = await backend.receive(1)
    assert received.headers == {"event_id": "event-1", "ce_type": "order.created", "note": "grüße ✓", "empty": ""}


@on_all_that()
async def test_a_message_without_a_value_stays_one(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    assert await sink.publish([Message("event-1", "k", None, {"event_id": "event-1"})]) == {}

    (received,) = await backend.receive(1)
    assert received.value == (None if backend.features.keeps_null_values else b"")


@on_all_that()
async def test_values_are_bytes_not_text(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    binary = bytes(range(256))

    assert await sink.publish([message(1, value=binary)]) == {}

    assert values(await backend.receive(1)) == [binary]


@on_all_that()
async def test_keys_may_be_any_text_or_none(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    keys = ["straße", "鍵", "🗝", "a b/c", None]

    assert await sink.publish([message(number, key=key) for number, key in enumerate(keys)]) == {}

    assert {item.key for item in await backend.receive(len(keys))} == set(keys)


@on_all_that()
async def test_an_empty_batch_is_nothing_to_do(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    assert await sink.publish([]) == {}
    assert await sink.publish([message(1)]) == {}

    assert len(await backend.receive(1)) == 1


@on_all_that()
async def test_a_batch_larger_than_any_request_is_split_and_keeps_its_order(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    padding = "." * 900
    batch = [message(number, key="hot" if number % 2 else None, a=padding, b=padding) for number in range(8_000)]

    assert await sink.publish(batch) == {}

    received = await backend.receive(8_000)
    assert len(received) == 8_000
    assert numbers(received, "hot") == list(range(1, 8_000, 2))


@on_all_that()
async def test_overlapping_calls_keep_the_order_in_which_they_were_made(backend: Backend, opened: Opened) -> None:
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


@on_all_that("too_large")
async def test_what_is_too_large_is_refused_before_anything_is_sent(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)

    refusal = sink.refusal(message(1, value=b"." * backend.features.too_large))

    assert isinstance(refusal, EventRefused)
    assert refusal.reason == "TooLarge"
    assert not refusal.retryable
    assert str(backend.features.too_large)[:3] in str(refusal)
    assert sink.refusal(message(2, value=b"." * 900_000)) is None
    assert await sink.publish([message(2, value=b"." * 900_000)]) == {}


@on_all_that("refuses_at_the_destination")
async def test_a_batch_of_one_that_the_destination_refuses_gets_a_definite_answer(
    backend: Backend, opened: Opened
) -> None:
    sink = await opened(backend)
    backend.refuse_poison()

    answer = await sink.publish([message(1, value=POISON)])

    assert [type(error) for error in answer.values()] == [EventRefused]
    assert await sink.publish([message(2)]) == {}
    assert values(await backend.receive(1)) == [b"2"]


@on_all_that("refuses_at_the_destination")
@pytest.mark.parametrize("poisoned", [0, 3])
async def test_nothing_of_a_key_arrives_behind_its_refused_message(
    backend: Backend, opened: Opened, poisoned: int
) -> None:
    """G2. The first message of all is a case of its own: see ``mailboat.sinks.kafka.producer``."""
    # Small Kafka batches, so that there is something behind the refused one on the way.
    sink = await opened(backend, config={"batch.num.messages": "3", "linger.ms": "20"})
    backend.refuse_poison()
    stream = [message(number, value=POISON if number == poisoned else None) for number in range(60)]
    batches = [stream[first : first + 6] for first in range(0, 60, 6)]

    answers = await asyncio.gather(*(sink.publish(batch) for batch in batches))

    delivered = _delivered(batches, answers)
    assert POISON not in [item.value for item in delivered]
    received = await backend.receive(len(delivered))
    assert values(received) == [item.value for item in delivered]
    assert numbers(received, "k") == list(range(len(received))), "something slipped past"
    assert len(received) <= poisoned

    # As the pump goes on: one at a time until the offender is found, and past it once it is settled.
    for item in stream[len(received) :]:
        answer = await sink.publish([item])
        if item.value == POISON:
            assert isinstance(answer[0], EventRefused)
        else:
            assert answer == {}
    assert numbers(await backend.receive(59), "k") == [number for number in range(60) if number != poisoned]


@on_all_that("refuses_at_the_destination")
async def test_a_key_is_free_again_once_every_call_that_held_it_has_returned(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    backend.refuse_poison()

    answers = await asyncio.gather(
        sink.publish([message(1, value=POISON)]),
        sink.publish([message(2), message(3, key="other")]),
    )
    assert isinstance(answers[0][0], EventRefused)
    assert isinstance(answers[1].get(0), Undecided)

    await until_it_arrives(sink, message(4))


@on_all_that("refuses_at_the_destination")
async def test_a_batch_of_one_is_told_its_own_fault_whatever_else_is_on_the_way(
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
    verdicts = [await sink.publish([message(number, value=POISON)]) for number in range(5)]
    busy = False
    await asyncio.gather(*lanes)

    assert [type(verdict[0]) for verdict in verdicts] == [EventRefused] * 5


@on_all_that("can_be_away")
async def test_a_destination_that_is_gone_costs_nobody_an_attempt_and_comes_back(
    backend: Backend, opened: Opened
) -> None:
    sink = await opened(backend, timeout=10)
    await until_it_arrives(sink, message(0))
    backend.go_away()

    answer = await sink.publish([message(1), message(2, key="other")])

    assert [type(error) for error in answer.values()] == [SinkUnavailable] * 2
    backend.come_back()
    # The same sink, and nothing of what was given up on arrives late.
    await until_it_arrives(sink, message(3))
    # (The last one itself may have come twice, where its first answer was late.)
    assert list(dict.fromkeys(values(await backend.receive(2), "k"))) == [b"0", b"3"]
    assert values(await backend.received(), "other") == []


@on_all_that("can_be_away")
async def test_a_destination_that_is_deaf_is_given_up_on_in_time(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend, timeout=10)
    await until_it_arrives(sink, message(0))
    backend.go_deaf()

    answers = await asyncio.gather(
        sink.publish([message(number) for number in range(1, 50)]),
        sink.publish([message(number) for number in range(50, 99)]),
    )

    assert all(len(answer) == 49 for answer in answers)
    assert all(isinstance(error, SinkUnavailable | Undecided) for answer in answers for error in answer.values())
    assert isinstance(answers[0][0], SinkUnavailable)
    backend.come_back()
    await until_it_arrives(sink, *(message(number) for number in range(1, 99)))
    # What was on the wire may arrive twice; what counts is the order of first arrivals.
    received = numbers(await backend.receive(99), "k")
    assert list(dict.fromkeys(received)) == list(range(99))


@on_all_that("can_be_away")
async def test_cancelling_a_call_purges_what_was_not_sent(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend, timeout=20)
    assert await sink.publish([message(0)]) == {}
    backend.go_deaf()
    padding = "." * 900
    batch = [message(number, a=padding, b=padding) for number in range(1, 6_000)]
    publishing = asyncio.create_task(sink.publish(batch))
    await asyncio.sleep(0)

    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing

    backend.come_back()
    await until_it_arrives(sink, message(6_000))
    received = numbers(await backend.receive(2), "k")
    assert received[-1] == 6_000
    # What was on the wire already may arrive, the rest may not.
    assert received[:-1] == list(range(len(received) - 1))
    assert len(received) < 5_000


@on_all_that()
async def test_closing_ends_calls_on_the_way_and_may_be_done_twice(backend: Backend, opened: Opened) -> None:
    sink = await opened(backend)
    if backend.features.can_be_away:
        backend.go_deaf()
        publishing = asyncio.create_task(sink.publish([message(1)]))
        await asyncio.sleep(0)
        await sink.close()
        answer = await publishing
        assert isinstance(answer[0], SinkUnavailable)

    await sink.close()
    await sink.close()

    assert isinstance((await sink.publish([message(2)]))[0], SinkUnavailable)


@on_all_that("has_topics")
async def test_a_topic_that_does_not_exist_is_named_together_with_what_to_do(backend: Backend, opened: Opened) -> None:
    with pytest.raises(SinkUnavailable, match=r"no-such-topic does not exist on .*: create it, or mend spec\.sink"):
        await opened(backend, topic="no-such-topic", timeout=10)


@on_all_that("can_be_away")
async def test_a_sink_that_could_not_open_opens_later(backend: Backend, opened: Opened) -> None:
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
    await until_it_arrives(sink, message(1))
    await sink.close()


def _delivered(batches: Sequence[Sequence[Message]], answers: Sequence[Failures]) -> list[Message]:
    return [
        item
        for batch, answer in zip(batches, answers, strict=True)
        for index, item in enumerate(batch)
        if index not in answer
    ]
