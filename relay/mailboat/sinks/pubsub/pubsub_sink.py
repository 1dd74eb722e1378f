"""The Pub/Sub sink: requests of different keys run concurrently, requests of one key one after the other.

Pub/Sub keeps the order in which it received messages of one ordering key, and a request may contain messages of one key
only. With at most one request per key in flight, across overlapping calls too, a failure stops later messages of its
key: the next request is sent only if the previous one arrived.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, Self

import grpc

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided
from mailboat.model import Message
from mailboat.sinks.key_fence import FenceTicket, KeyFence
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, SinkContext, Traits
from mailboat.sinks.pubsub.channel import REFUSING, PublisherChannel, PubSubEndpoint, open_channel, unavailable

MAX_REQUEST_BYTES: Final = 10_000_000
GOOD_REQUEST_BYTES: Final = 4_000_000
"""Size at which requests are split. Larger ones gain nothing; gRPC servers (also Google's fake) default to 4 MiB."""
MAX_REQUEST_MESSAGES: Final = 1_000
MAX_ATTRIBUTES: Final = 100
MAX_ATTRIBUTE_NAME_BYTES: Final = 256
MAX_ATTRIBUTE_VALUE_BYTES: Final = 1024
MAX_ORDERING_KEY_BYTES: Final = 1024
_RESERVED_PREFIX: Final = "goog"
_FIELD: Final = "spec.sink.pubsub"

_REQUEST_OVERHEAD: Final = 1024  # topic name and framing
_MESSAGE_OVERHEAD: Final = 64
_ATTRIBUTE_OVERHEAD: Final = 16

_OPEN_TIMEOUT: Final = 10.0
_REQUESTS_ON_THE_WAY: Final = 64


class PubSubSink:
    """Sink for one Pub/Sub topic. The ordering key is the event's key."""

    traits = Traits(header_prefix="ce-", stops_behind_failure=True)

    def __init__(self, project: str, topic: str, destination: PubSubEndpoint, *, delivery_timeout: float) -> None:
        self._project = project
        self._topic = self._path(topic)
        self._destination = destination
        self._delivery_timeout = delivery_timeout
        self._connection: PublisherChannel | None = None
        self._suspect = False
        self._calls: set[_Call] = set()
        self._tails: dict[str, asyncio.Future[bool]] = {}
        """By key, whether the most recently queued call's requests arrived."""
        self._free = asyncio.Semaphore(_REQUESTS_ON_THE_WAY)
        self._fence = KeyFence()
        self._closed = False

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        """Build the sink from ``mailboat_spec.PubSubSink``. Without an endpoint, PUBSUB_EMULATOR_HOST applies."""
        reference = config.credentials_secret_ref
        key_file = None if reference is None else context.secrets[reference.key]
        emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
        destination = PubSubEndpoint.choose(config.endpoint, emulator, key_file, context.subscription)
        return cls(config.project, config.topic, destination, delivery_timeout=context.delivery_timeout)

    async def open(self) -> None:
        self._closed = False
        if self._connection is None:
            self._connection = PublisherChannel(await open_channel(self._destination, _FIELD), self._topic)
        await self._look_up(self._topic)

    async def check_topic(self, topic: str) -> None:
        await self._look_up(self._path(topic))

    async def _look_up(self, topic: str) -> None:
        if self._connection is None:
            raise SinkUnavailable("the sink is not open")
        timeout = min(_OPEN_TIMEOUT, self._delivery_timeout)
        try:
            await self._connection.look_up_topic(topic, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:  # a publisher need not have topics.get permission
                raise unavailable(error, topic, self._destination.host, timeout) from error
        except grpc.aio.UsageError:  # the channel was closed before the call
            raise SinkUnavailable("its connection was closed") from None

    def refusal(self, message: Message) -> EventRefused | None:
        if message.key is not None and _size(message.key) > MAX_ORDERING_KEY_BYTES:
            return _refused(f"its key has more than {MAX_ORDERING_KEY_BYTES} bytes", "KeyTooLong")
        if len(message.headers) > MAX_ATTRIBUTES:
            return _refused(f"it has {len(message.headers)} attributes, more than {MAX_ATTRIBUTES}", "TooManyHeaders")
        for name, value in message.headers.items():
            if not 0 < _size(name) <= MAX_ATTRIBUTE_NAME_BYTES or name.startswith(_RESERVED_PREFIX):
                return _refused(
                    f"attribute {name[:64]!r} must have a name of 1 to {MAX_ATTRIBUTE_NAME_BYTES} bytes that does not "
                    f"begin with {_RESERVED_PREFIX}",
                    "InvalidHeaders",
                )
            if _size(value) > MAX_ATTRIBUTE_VALUE_BYTES:
                return _refused(f"attribute {name} has more than {MAX_ATTRIBUTE_VALUE_BYTES} bytes", "InvalidHeaders")
        size = request_bytes(message) + _REQUEST_OVERHEAD
        if size > MAX_REQUEST_BYTES:
            return _refused(f"it has {size} bytes, more than {MAX_REQUEST_BYTES}", "TooLarge")
        return None

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        return self._publish(batch, FenceTicket(self._fence))

    async def _publish(self, batch: Sequence[Message], hold: FenceTicket) -> Failures:
        deadline = asyncio.get_running_loop().time() + self._delivery_timeout
        with hold:
            hold.begin()
            call = _Call(batch, hold, deadline)
            turns = {key: self._queue_up(key) for key in call.keyed}
            self._calls.add(call)
            try:
                await self._renew_suspect_connection(call)
                async with asyncio.TaskGroup() as group:
                    for indexes in call.keyless.values():
                        for request in requests(batch, indexes):
                            group.create_task(self._send(call, request, ""))
                    for key, indexes in call.keyed.items():
                        group.create_task(self._send_in_order(call, indexes, key, turns[key]))
            finally:
                self._calls.discard(call)
                for key, turn in turns.items():
                    self._end(key, turn, arrived=False)  # no effect on turns that have ended
        return call.failures or ALL_DELIVERED

    async def close(self) -> None:
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    # ---- order per key ---------------------------------------------------------------------------------------------

    def _queue_up(self, key: str) -> _Turn:
        """Queue a call for a key. Runs before the first await, so that calls queue in the order of their creation."""
        turn = _Turn(self._tails.get(key), asyncio.get_running_loop().create_future())
        self._tails[key] = turn.arrived
        return turn

    def _end(self, key: str, turn: _Turn, *, arrived: bool) -> None:
        if not turn.arrived.done():
            turn.arrived.set_result(arrived)
        if self._tails.get(key) is turn.arrived:
            del self._tails[key]

    async def _send_in_order(self, call: _Call, indexes: Sequence[int], key: str, turn: _Turn) -> None:
        arrives = turn.before is None or await asyncio.shield(turn.before)
        for _, run in groupby(indexes, key=lambda index: call.batch[index].topic):
            for request in requests(call.batch, list(run)):
                if arrives and key not in call.hold.blocked:
                    arrives = await self._send(call, request, key)
                else:
                    undecided = Undecided("an earlier message of its key did not arrive")
                    call.failures |= call.hold.fail(call.batch, request, undecided)
                    arrives = False
        self._end(key, turn, arrived=arrives)

    async def _send(self, call: _Call, request: Sequence[int], key: str) -> bool:
        """Send one request and return whether it arrived. A request succeeds or fails as a whole."""
        async with self._free:
            error = await self._answer([call.batch[index] for index in request], key, call.deadline)
        if error is not None:
            call.failures |= call.hold.fail(call.batch, request, error)
        return error is None

    async def _answer(self, messages: Sequence[Message], key: str, deadline: float) -> DeliveryError | None:
        connection = self._connection
        if self._closed or connection is None:
            return SinkUnavailable("the sink is not open")
        timeout = deadline - asyncio.get_running_loop().time()
        if timeout <= 0:
            return SinkUnavailable(f"could not be sent within {self._delivery_timeout:g} s")
        topic = messages[0].topic
        path = self._topic if topic is None else self._path(topic)
        try:
            await connection.publish(messages, key, timeout=timeout, topic=path)
        except grpc.aio.AioRpcError as error:
            if error.code() in REFUSING:
                if len(messages) == 1:
                    return EventRefused(f"Pub/Sub refused it: {error.details()} ({error.code().name})")
                return Undecided(f"Pub/Sub refused the request that it was in: {error.details()}")
            self._suspect = self._suspect or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return unavailable(error, path, self._destination.host, self._delivery_timeout)
        except grpc.aio.UsageError:  # the channel was closed before the call
            return SinkUnavailable("its connection was closed")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return SinkUnavailable("its connection was closed")  # a closed channel cancels its calls
        except (ValueError, TypeError, UnicodeError) as error:
            return EventRefused(f"its key or headers can't be sent: {error}", reason="InvalidText", retryable=False)
        return None

    async def _renew_suspect_connection(self, call: _Call) -> None:
        """Replace the connection after a timeout, if no other call uses it: the peer may be gone without a reset."""
        if self._suspect and self._calls == {call}:
            self._suspect = False
            try:
                fresh = PublisherChannel(await open_channel(self._destination, _FIELD), self._topic)
            except SinkUnavailable:
                self._suspect = True  # no credentials at the moment: keep the old connection
                return
            stale, self._connection = self._connection, fresh
            if stale is not None:
                await stale.close()

    def _path(self, topic: str) -> str:
        return f"projects/{self._project}/topics/{topic}"


class _Turn(NamedTuple):
    """Position of a call in the queue of one key."""

    before: asyncio.Future[bool] | None
    arrived: asyncio.Future[bool]


class _Call:
    """One ``publish`` call: its batch, split by key for concurrent requests, and its failures."""

    def __init__(self, batch: Sequence[Message], hold: FenceTicket, deadline: float) -> None:
        self.batch = batch
        self.deadline = deadline
        self.failures: dict[int, DeliveryError] = {}
        self.keyed: dict[str, list[int]] = {}
        self.keyless: dict[str | None, list[int]] = {}
        """Indexes of messages without a key, by topic."""
        self.hold = hold
        for index, message in enumerate(batch):
            if message.key:
                self.keyed.setdefault(message.key, []).append(index)
            else:  # no key, or an empty one, which Pub/Sub treats as none
                self.keyless.setdefault(message.topic, []).append(index)


def request_bytes(message: Message) -> int:
    """Return an upper bound of the bytes that a message adds to a request."""
    size = _MESSAGE_OVERHEAD + len(message.value or b"") + _size(message.key or "")
    for name, value in message.headers.items():
        size += _ATTRIBUTE_OVERHEAD + _size(name) + _size(value)
    return size


def requests(batch: Sequence[Message], indexes: Sequence[int]) -> Iterator[list[int]]:
    """Split messages of one key into requests within the limits, in order."""
    request: list[int] = []
    size = _REQUEST_OVERHEAD
    for index in indexes:
        adds = request_bytes(batch[index])
        if request and (len(request) == MAX_REQUEST_MESSAGES or size + adds > GOOD_REQUEST_BYTES):
            yield request
            request, size = [], _REQUEST_OVERHEAD
        request.append(index)
        size += adds
    if request:
        yield request


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _refused(why: str, reason: str) -> EventRefused:
    return EventRefused(f"Pub/Sub does not take this message: {why}", reason=reason, retryable=False)
