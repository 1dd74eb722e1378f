"""The Pub/Sub source: leases, order of a key, give-backs, shutdown, outages.

Google's fake verifies the calls. The fake sends one message of a key at a time, so order is tested with
``OrderedPubSub``, which sends many messages of a key and redelivers them as Google's service does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.cloud import pubsub_v1
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.interfaces import Record
from mailboat.consumer.broker.pubsub_keys import Bounds, Decision, Held, HeldMessages
from mailboat.consumer.broker.pubsub_source import PubSubSettings, PubSubSource
from mailboat.errors import ConfigError
from mailboat.sinks.pubsub.channel import PubSubEndpoint
from mailboat_devservers.proxy import Proxy
from mailboat_devservers.pubsub import PubSubServer
from support.ordered_pubsub import PATH, OrderedPubSub
from support.sink_backends import PubSubBackend, message
from support.wait import await_until, wait_until


class Receiving:
    """A receiver that only collects messages. The test settles them or gives them back."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.source: PubSubSource | None = None
        self.revoked: list[set[int]] = []

    def take(self, records: Iterable[Record]) -> None:
        self.records += records

    async def revoke(self, partitions: Iterable[int], within: float) -> None:
        self.revoked.append({*partitions})

    def lose(self, partitions: Iterable[int]) -> None:
        raise AssertionError("Pub/Sub never loses all of a partition")

    def texts(self, key: str | None = None) -> list[str]:
        return [
            (record.event.payload or b"").decode() for record in self.records if key is None or record.event.key == key
        ]

    def keys(self) -> set[str | None]:
        return {record.event.key for record in self.records}

    async def until(self, count: int, key: str | None = None) -> list[str]:
        await await_until(lambda: len(self.texts(key)) >= count, what=f"{count} messages")
        return self.texts(key)


def settings(host: str, *, subscription: str = "orders", lease: int = 30, **more: Any) -> PubSubSettings:
    return PubSubSettings(
        project="acme",
        subscription=subscription,
        destination=PubSubEndpoint(host, plain=True),
        lease=lease,
        **more,
    )


@asynccontextmanager
async def receiving(host: str, **more: Any) -> AsyncIterator[tuple[PubSubSource, Receiving]]:
    source, receiver = PubSubSource(settings(host, **more), decode), Receiving()
    await source.start(receiver)
    try:
        yield source, receiver
    finally:
        await source.stop()


@pytest.fixture
def service() -> Iterator[OrderedPubSub]:
    service = OrderedPubSub()
    yield service
    service.close()


# ---- the real protocol -------------------------------------------------------------------------------------------


@pytest.fixture
def google(pubsub: PubSubServer) -> Iterator[PubSubBackend]:
    backend = PubSubBackend(pubsub, enable_message_ordering=True)
    yield backend
    backend.close()


async def test_messages_of_the_relay_are_received_in_the_order_of_their_keys_and_acknowledged(
    google: PubSubBackend, pubsub: PubSubServer
) -> None:
    sink = google.sink()
    await sink.open()
    await sink.publish([message(number, key=f"k{number % 3}" if number % 4 else None) for number in range(40)])
    await sink.close()

    async with receiving(pubsub.host, subscription=google.topic) as (source, receiver):
        for count in range(40):
            await receiver.until(count + 1)
            source.settle(receiver.records[count])

    for key in ("k0", "k1", "k2"):
        numbers = [int(text) for text in receiver.texts(key)]
        assert numbers == sorted(numbers)
    assert sorted(map(int, receiver.texts())) == list(range(40))
    assert await google.received() == []  # all messages are acknowledged


async def test_a_missing_subscription_is_named_with_the_resource_to_create(pubsub: PubSubServer) -> None:
    source = PubSubSource(settings(pubsub.host, subscription="nobody-made-it"), decode)

    with pytest.raises(ConfigError, match=r"projects/acme/subscriptions/nobody-made-it does not exist .*ordering"):
        await source.start(Receiving())


async def test_a_subscription_without_ordering_and_with_a_dead_letter_topic_is_warned_of(
    google: PubSubBackend, pubsub: PubSubServer, caplog: pytest.LogCaptureFixture
) -> None:
    dead = {"dead_letter_topic": f"projects/acme/topics/{google.topic}"}
    backend = PubSubBackend(pubsub, dead_letter_policy=dead)
    async with receiving(pubsub.host, subscription=backend.topic):
        backend.close()

    assert "has no message ordering" in caplog.text
    assert "has a dead-letter topic of its own" in caplog.text


async def test_the_source_waits_for_the_service_and_logs_it_once_per_outage(
    service: OrderedPubSub, proxy_factory: Callable[[int], Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mailboat")
    proxy = proxy_factory(int(service.host.rpartition(":")[2]))
    proxy.stop()
    source, receiver = PubSubSource(settings(proxy.address), decode), Receiving()
    starting = asyncio.create_task(source.start(receiver))
    await await_until(lambda: source.state().error, what="the source to notice that nothing listens")
    proxy.start()
    await starting
    service.publish("k", b"1")
    await receiver.until(1)

    proxy.stop()
    await await_until(lambda: source.state().error, what="the source to notice the outage")
    source.settle(receiver.records[0])
    service.publish("k", b"2")
    proxy.start()

    assert await receiver.until(2) == ["1", "2"]
    source.settle(receiver.records[1])
    await await_until(lambda: not service.unacknowledged, what="both acknowledgements")
    await source.stop()
    said = [record.message for record in caplog.records if record.name.startswith("mailboat.consumer")]
    assert said == 2 * ["Pub/Sub unavailable, consumer waits", "Pub/Sub available again"]
    assert service.redelivered == 0


# ---- leases ------------------------------------------------------------------------------------------------------


async def test_a_message_stays_leased_however_long_it_is_held_while_the_loop_is_blocked_and_streams_end(
    service: OrderedPubSub,
) -> None:
    async with receiving(service.host, lease=1) as (source, receiver):
        for number in range(3):
            service.publish("k", b"%d" % number)
        await receiver.until(3)

        time.sleep(2.5)  # noqa: ASYNC251  a handler that blocks the loop
        service.end_streams()
        service.publish("other", b"0")
        await receiver.until(1, "other")
        for record in receiver.records:
            source.settle(record)
        await await_until(lambda: not service.unacknowledged, what="the acknowledgements")

    assert service.expired == service.redelivered == 0


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_a_message_redelivered_while_it_is_held_is_passed_on_once_and_acknowledged(
    service: OrderedPubSub, exactly_once: bool
) -> None:
    service.exactly_once = exactly_once
    async with receiving(service.host) as (source, receiver):
        for number in range(3):
            service.publish("k", b"%d" % number)
        service.publish("", b"without key")
        await receiver.until(4)
        service.expire_leases()
        await await_until(lambda: service.redelivered == 4 and service.leased == 4, what="the redelivery")
        service.publish("k", b"3")

        assert await receiver.until(4, "k") == ["0", "1", "2", "3"]
        for record in receiver.records:
            source.settle(record)
        await await_until(lambda: not service.unacknowledged, what="the acknowledgements")


async def test_acknowledgements_are_repeated_until_the_service_takes_them(service: OrderedPubSub) -> None:
    async with receiving(service.host, lease=1) as (source, receiver):
        service.fail_acks = grpc.StatusCode.UNAVAILABLE
        service.publish("k", b"1")
        await receiver.until(1)
        source.settle(receiver.records[0])
        await await_until(lambda: service.failed_acks > 2, what="attempts")
        service.fail_acks = None
        await await_until(lambda: not service.unacknowledged, what="the acknowledgement")

    assert service.redelivered == 0


# ---- order of a key ----------------------------------------------------------------------------------------------


async def test_a_key_that_is_held_too_long_is_given_back_and_returns_in_order(service: OrderedPubSub) -> None:
    async with receiving(service.host, max_hold=0.5) as (source, receiver):
        for number in range(5):
            service.publish("slow", b"%d" % number)
        service.publish("quick", b"0")
        await receiver.until(6)
        (quick,) = (record for record in receiver.records if record.event.key == "quick")
        source.settle(quick)
        number_of_slow = receiver.records[0].partition

        await await_until(lambda: receiver.revoked, what="the key to be given back")
        service.publish("slow", b"5")

        assert receiver.revoked[0] == {number_of_slow}
        texts = await receiver.until(11, "slow")
        assert texts[:11] == ["0", "1", "2", "3", "4", "0", "1", "2", "3", "4", "5"]


async def test_a_message_sent_before_the_nack_does_not_overtake_the_one_given_back(service: OrderedPubSub) -> None:
    async with receiving(service.host, bounds=Bounds(longest_tail=200)) as (source, receiver):
        for number in range(200):
            service.publish("k", b"%d" % number)
        await receiver.until(20)
        held = receiver.records[:]
        for record in held:  # the other messages are in flight
            source.release(record)

        assert (await receiver.until(len(held) + 50))[len(held) : len(held) + 50] == [str(n) for n in range(50)]


async def test_a_long_tail_of_a_key_is_handled_in_order_and_never_given_back(service: OrderedPubSub) -> None:
    async with receiving(service.host) as (source, receiver):
        for number in range(200):
            service.publish("k", b"%d" % number)
        for count in range(200):
            await receiver.until(count + 1)
            source.settle(receiver.records[count])

        assert receiver.texts() == [str(number) for number in range(200)]
        assert service.nacks == 0


async def test_the_tail_of_a_key_that_does_not_progress_leaves_room_for_the_others(
    service: OrderedPubSub,
) -> None:
    service.retry_delay = 0.5
    async with receiving(service.host, bounds=Bounds(max_messages=20, stuck_after=0.2)) as (source, receiver):
        for number in range(40):
            service.publish("parked", b"%d" % number)
        for number in range(5):
            service.publish(f"other {number}", b"0")

        await await_until(lambda: {f"other {number}" for number in range(5)} <= receiver.keys(), what="other keys")
        assert receiver.texts("parked") == [str(number) for number in range(10)]
        for record in receiver.records:
            if record.event.key != "parked":
                source.settle(record)
        for count in range(40):
            await receiver.until(count + 1, "parked")
            source.settle([record for record in receiver.records if record.event.key == "parked"][count])
        assert receiver.texts("parked") == [str(number) for number in range(40)]


def test_an_interrupted_key_continues_if_another_consumer_finished_the_message_given_back() -> None:
    held = HeldMessages(Bounds())
    first, second, third = (held_message(number) for number in (1, 2, 3))
    held.arrive(first, 0.0)
    held.remove(first, 0.0)
    interruption = held.interrupt(first)
    assert interruption is not None

    assert held.arrive(second, 0.0) is Decision.REFUSE
    assert held.arrive(second, 0.0) is Decision.REFUSE  # may have been sent before the service received the nack
    interruption.confirmed = True
    assert held.arrive(third, 0.0) is Decision.REFUSE
    assert held.arrive(third, 0.0) is Decision.DELIVER  # sent after the nack: the first message is finished
    assert not held.interruptions


def test_a_refused_message_does_not_overtake_an_older_one_that_was_refused_after_it() -> None:
    """Another consumer finished the first message, and its lease of the second one expired."""
    held = HeldMessages(Bounds())
    first, second, third = (held_message(number) for number in (1, 2, 3))
    held.arrive(first, 0.0)
    held.remove(first, 0.0)
    interruption = held.interrupt(first)
    assert interruption is not None
    interruption.confirmed = True

    assert held.arrive(third, 0.0) is Decision.REFUSE  # in flight since before the nack
    assert [held.arrive(each, 0.0) for each in (second, third)] == [Decision.REFUSE, Decision.REFUSE]
    assert [held.arrive(each, 0.0) for each in (second, third)] == [Decision.DELIVER, Decision.DELIVER]


def held_message(number: int) -> Held:
    return Held(message_id=str(number), key="k", published=datetime.now(UTC), size=1, ack_id=f"ack {number}")


# ---- shutdown ----------------------------------------------------------------------------------------------------


async def test_shutdown_gives_everything_back_at_once_and_the_next_consumer_gets_it_in_order(
    service: OrderedPubSub,
) -> None:
    async with receiving(service.host) as (source, receiver):
        for number in range(300):
            service.publish(f"k{number % 3}", b"%d" % number)
        await await_until(lambda: source.state().partitions[0].ahead == 300, what="all messages")
        assert len(receiver.records) == 30  # the other messages wait behind these

    assert service.leased == service.expired == 0
    async with receiving(service.host, bounds=Bounds(longest_tail=100)) as (_, successor):
        await successor.until(300)
        for key in range(3):
            assert successor.texts(f"k{key}") == [str(number) for number in range(key, 300, 3)]


async def test_shutdown_gives_a_key_back_only_behind_its_running_handler(service: OrderedPubSub) -> None:
    source, receiver = PubSubSource(settings(service.host), decode), Receiving()
    await source.start(receiver)
    for number in range(3):
        service.publish("k", b"%d" % number)
    service.publish("", b"another")
    await receiver.until(4)
    first, second, third, another = receiver.records

    for record in (third, second, another):
        source.release(record)
    await await_until(lambda: service.nacks, what="the nack of the last one given back")
    assert service.nacks == 1
    source.settle(first)
    await source.stop()

    assert len(service.unacknowledged) == 3
    assert service.leased == 0


# ---- why Google's client is not used -------------------------------------------------------------------------------


def test_googles_client_hands_on_the_next_message_of_a_key_after_a_nack(service: OrderedPubSub) -> None:
    for number in range(3):
        service.publish("k", b"%d" % number)
    handled: list[str] = []

    def refuse_the_first(message: Any) -> None:
        handled.append(message.data.decode())
        (message.ack if len(handled) > 1 else message.nack)()

    channel = grpc.insecure_channel(service.host)
    client = pubsub_v1.SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))
    stream = client.subscribe(PATH, refuse_the_first)
    wait_until(lambda: handled.count("0") == 2, what="the nacked message to return")
    stream.cancel()
    stream.result(60)
    channel.close()

    assert handled[:2] == ["0", "1"]
