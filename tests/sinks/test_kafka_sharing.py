"""Subscriptions to one cluster share a producer, and the failures of one do not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable
from mailboat.sinks.kafka import KafkaSink
from mailboat.sinks.kafka.producer import ProducerEpoch
from support.sink_backends import POISON, KafkaBackend, Opened, message, publish_until_delivered
from support.wait import await_until


def session(sink: KafkaSink) -> ProducerEpoch:
    assert sink._share is not None
    return sink._share.session


@pytest.fixture
def neighbour(kafka: KafkaBackend) -> KafkaBackend:
    """Another topic of the same cluster."""
    return KafkaBackend(kafka.server, partitions=1)


async def test_a_producer_is_shared_by_sinks_with_the_same_settings_until_the_last_is_closed(
    kafka: KafkaBackend, neighbour: KafkaBackend, opened: Opened
) -> None:
    one, two, dead = await opened(kafka), await opened(neighbour), message(0)._replace(topic=kafka.topic)
    differing = {"config": {"linger.ms": "1"}}, {"secrets_": {"sasl.password": "rotated"}}, {"timeout": 20}
    others = [await opened(kafka, **more) for more in differing]
    neighbour.configure("max.message.bytes", "50000")
    others.append(await opened(neighbour))

    assert session(one) is session(two)
    assert len({session(sink) for sink in (one, *others)}) == 5

    shared = session(one)
    await one.close()
    assert await two.publish([message(1), dead]) == {}, "the producer ended with one of its sinks"
    assert session(two) is shared
    await two.close()
    assert shared.closing is not None
    assert shared.closing.done()


async def fails(sink: KafkaSink, value: bytes, error: type[DeliveryError]) -> bool:
    async def does() -> bool:
        return type((await sink.publish([message(0, value=value)])).get(0)) is error

    return await await_until(does, what=f"{error} from the broker")


@pytest.mark.parametrize(
    ("spoil", "value", "error"),
    [(KafkaBackend.refuse_poison, POISON, EventRefused), (KafkaBackend.delete_topic, b"0", SinkUnavailable)],
)
async def test_a_failing_topic_costs_other_topics_no_attempt_keeps_their_order_and_ends_their_producer_once(
    kafka: KafkaBackend,
    neighbour: KafkaBackend,
    opened: Opened,
    spoil: Callable[[KafkaBackend], None],
    value: bytes,
    error: type[DeliveryError],
) -> None:
    config = {"topic.metadata.propagation.max.ms": "100"}  # librdkafka's wait for a missing topic
    sink, other = [await opened(backend, timeout=20, config=config) for backend in (neighbour, kafka)]
    await publish_until_delivered(sink, message(0))
    spoil(neighbour)
    enough = asyncio.Event()

    async with asyncio.TaskGroup() as tasks:
        delivering = tasks.create_task(delivered_in_order(other, enough))
        await fails(sink, value, error)
        await await_until(lambda: not session(other).stopped, what="the next shared producer")
        shared = session(other)
        await fails(sink, value, error)
        assert session(sink) is not session(other)
        assert (session(other), shared.stopped) == (shared, False), "the second failure ended the shared producer"
        enough.set()

    received = await kafka.receive(delivering.result())
    numbers = [int(item.value or b"") for item in received]
    assert list(dict.fromkeys(numbers)) == list(range(delivering.result()))


async def delivered_in_order(sink: KafkaSink, enough: asyncio.Event) -> int:
    """Publish and retry as a partition worker does, and return the number of messages. A refusal costs an attempt."""
    number = 0
    while not enough.is_set():
        pending, number = [message(index) for index in range(number, number + 100)], number + 100
        while failures := await sink.publish(pending):
            assert {type(error) for error in failures.values()} == {SinkUnavailable}, failures
            pending = [pending[index] for index in sorted(failures)]
    return number


async def test_a_sink_that_failed_shares_the_producer_again_later(
    kafka: KafkaBackend, neighbour: KafkaBackend, opened: Opened
) -> None:
    sink, other = await opened(neighbour), await opened(kafka)
    neighbour.refuse_poison()
    await fails(sink, POISON, EventRefused)
    await publish_until_delivered(sink, message(1))
    own = session(sink)
    await publish_until_delivered(other, message(1))
    assert own is not session(other)
    sink._share_again()  # as the timer does after ten minutes

    await await_until(lambda: own.closing and own.closing.done(), what="the end of the sink's own producer")
    await publish_until_delivered(sink, message(2))

    assert session(sink) is session(other)
    assert [item.value for item in await neighbour.receive(2)] == [b"1", b"2"]
