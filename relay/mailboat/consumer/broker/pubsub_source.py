"""Pub/Sub as a source of events: one subscription, ordering keys as lanes.

A message is leased until it is settled: the stream renews its lease however long the handler takes, and a failed event
is retried in place. A key is given back to the service only

- if its oldest message is not settled after ``max_hold``: another consumer may do better; or
- in part, if it does not progress and its messages would take the room of other keys (``pubsub_keys``); or
- at shutdown.

Each key that is held has a partition number of its own, so that the engine can forget one key alone. Messages without
an ordering key have partition 0 and no order.

The service does not report the number of messages that wait, so the lag is unknown: ``state`` counts the messages that
this consumer has received and not settled, all keys together as partition 0.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from mailboat.consumer.broker.interfaces import (
    BrokerPoint,
    Original,
    PartitionState,
    PassingPoint,
    Receiver,
    Record,
    SourceState,
    ignore_point,
)
from mailboat.consumer.broker.pubsub_keys import Bounds, Decision, Held, HeldKey, HeldMessages, Interruption
from mailboat.consumer.broker.pubsub_stream import Delivery, PullStream, ServiceUnavailable
from mailboat.sinks.pubsub.channel import PubSubEndpoint

Decode = Callable[[Original], Record]

_LOGGER: Final = logging.getLogger(__name__)
_FIRST_BACKOFF: Final = 0.2
_LONGEST_BACKOFF: Final = 10.0
_WITHOUT_KEY: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PubSubSettings:
    """A subscription, and how much of it one consumer holds."""

    project: str
    subscription: str
    destination: PubSubEndpoint
    bounds: Bounds = field(default_factory=Bounds)
    lease: int = 30
    """Seconds. Messages of a consumer that died are redelivered after this time. The service accepts 10 to 600."""
    max_hold: float = 3600.0
    """Seconds after which a key is given back whose oldest message is not settled."""
    drain: float = 20.0
    """Seconds that running handlers get at shutdown."""

    @property
    def path(self) -> str:
        return f"projects/{self.project}/subscriptions/{self.subscription}"


class PubSubSource:
    """Source of one subscription. All methods run in the engine's event loop."""

    def __init__(self, settings: PubSubSettings, decode: Decode, passing: PassingPoint = ignore_point) -> None:
        self._settings = settings
        self._decode = decode
        self._held = HeldMessages(settings.bounds)
        self._receiver: Receiver | None = None
        self._stream: PullStream | None = None
        self._acks: list[str] = []
        self._settled_keys: dict[str, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = passing
        self._connected = False
        self._stopping = False
        self._error: str | None = None

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        settings = self._settings
        self._stream = PullStream(
            settings.destination, settings.path, settings.bounds, settings.lease, self._on_deliveries, self._report
        )
        backoff = _FIRST_BACKOFF
        while True:
            try:
                subscription = await self._stream.open()
                break
            except ServiceUnavailable as error:
                self._report(str(error))
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
            except BaseException:
                await self._stream.close()
                raise
        self._report(None)
        for warning in _warnings(settings.path, subscription):
            _LOGGER.warning(warning)
        await self._stream.start()
        self._connected = True
        self._spawn(self._watch_holds())

    def settle(self, record: Record) -> None:
        message: Held = record.handle
        self._held.remove(message, self._now())
        if not self._acks:
            asyncio.get_running_loop().call_soon(self._flush_settled)
        self._acks.append(message.ack_id)
        if message.key:
            self._return(message.key)
            self._settled_keys[message.key] = None

    def release(self, record: Record) -> None:
        message: Held = record.handle
        if self._held.find(message) is not message:
            return
        if message.key:
            message.released = True
            self._return(message.key)
        else:
            self._held.remove(message, self._now())
            self._nack([message])

    def state(self) -> SourceState:
        oldest = min((message.published for message in self._held), default=None)
        held = PartitionState(lag=None, ahead=len(self._held), oldest=oldest, paused=self._held.is_full())
        connected = self._connected and self._error is None
        return SourceState(connected=connected, error=self._error, partitions={_WITHOUT_KEY: held})

    async def stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stream is None or self._receiver is None:
            return
        self._connected = False
        partitions = [_WITHOUT_KEY, *(key.number for key in self._held.keys.values())]
        await asyncio.gather(self._receiver.revoke(partitions, self._settings.drain), self._stream.stop_reading())
        self._nack(list(self._held))
        self._send_acks()
        await self._stream.close()

    # ---- arrivals --------------------------------------------------------------------------------------------------

    def _on_deliveries(self, deliveries: Iterable[Delivery]) -> None:
        records = []
        refused: list[Held] = []
        for delivery in deliveries:
            message = _held(delivery)
            held = self._held.find(message)
            if held is not None and held.ack_id != message.ack_id:
                self._stream_of().forget(held.ack_id)
            decision = self._held.arrive(message, self._now())
            if decision is Decision.DELIVER and not self._stopping:
                records.append(self._record(message))
            elif decision is Decision.REFUSE:
                refused.append(message)
        if records:
            assert self._receiver is not None
            self._receiver.take(records)
        for message in refused:
            self._refuse(message)

    def _record(self, message: Held) -> Record:
        content, message.content = message.content, None
        key = self._held.keys.get(message.key) if message.key else None
        original = Original(
            topic=self._settings.path,
            partition=None,
            offset=message.message_id,
            timestamp=message.published,
            key=message.key.encode() if message.key else None,
            value=content.data,
            headers=tuple((name, value.encode()) for name, value in content.attributes.items()),
        )
        number = _WITHOUT_KEY if key is None else key.number
        message.record = replace(self._decode(original), partition=number, handle=message)
        return message.record

    # ---- acknowledgements and nacks --------------------------------------------------------------------------------

    def _flush_settled(self) -> None:
        """Acknowledge all messages that were settled in one step of the event loop, and hand on the next ones."""
        self._send_acks()
        keys, self._settled_keys = self._settled_keys, {}
        if self._stopping or self._receiver is None:
            return
        records = [self._record(message) for key in keys for message in self._held.next_of(key)]
        if records:
            self._receiver.take(records)

    def _send_acks(self) -> None:
        acks, self._acks = self._acks, []
        if acks:
            self._stream_of().ack(acks)
            self._passing(BrokerPoint.COMMITTED)

    def _nack(self, messages: list[Held], *, overflow: bool = False) -> None:
        """Give back messages of one key, oldest first, or messages of all keys at shutdown."""
        if not messages:
            return
        interruption = None
        if messages[0].key and not self._stopping:
            interruption = self._held.interrupt(messages[0], overflow=overflow)
        self._stream_of().nack([message.ack_id for message in messages], _confirmation(interruption))

    def _refuse(self, message: Held) -> None:
        """Nack a message that was not handed on: an older one of its key was given back."""
        interruption = self._held.interruptions.get(message.key)
        caused = interruption is not None and interruption.message_id == message.message_id
        send = partial(self._stream_of().nack, [message.ack_id], _confirmation(interruption if caused else None))
        if interruption is not None and interruption.pause:
            asyncio.get_running_loop().call_later(interruption.pause, send)
        else:
            send()

    def _return(self, key: str) -> None:
        """Nack the messages of a key that the engine gave back and that no earlier message precedes."""
        messages = self._held.returnable(key)
        for message in messages:
            self._held.remove(message, self._now())
        self._nack(messages)

    # ---- keys that are held too long -------------------------------------------------------------------------------

    async def _watch_holds(self) -> None:
        while True:
            await asyncio.sleep(min(self._settings.max_hold / 4, 1.0))
            for tail in self._held.tails(self._now()):
                self._nack(tail, overflow=True)
            limit = self._now() - self._settings.max_hold
            for name, key in self._held.keys.items():
                if key.head_since < limit and not key.releasing:
                    key.releasing = True
                    self._spawn(self._release_key(name, key))

    async def _release_key(self, name: str, key: HeldKey) -> None:
        """Let the engine forget the key, wait for its running handler however long it takes, and nack the rest."""
        assert self._receiver is not None
        _LOGGER.warning(
            "Key held too long, given back to Pub/Sub",
            extra={"subscription": self._settings.path, "messages": len(key.messages)},
        )
        await self._receiver.revoke([key.number], math.inf)
        self._nack(self._held.release(name, self._now()))

    # ---- the rest --------------------------------------------------------------------------------------------------

    def _report(self, error: str | None) -> None:
        if error is not None and self._error is None:
            _LOGGER.warning("Pub/Sub unavailable, consumer waits", extra={"reason": error})
        elif error is None and self._error is not None:
            _LOGGER.info("Pub/Sub available again")
        self._error = error

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stream_of(self) -> PullStream:
        assert self._stream is not None
        return self._stream

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _held(delivery: Delivery) -> Held:
    content = delivery.message
    time = content.publish_time
    return Held(
        message_id=content.message_id,
        key=content.ordering_key,
        published=datetime.fromtimestamp(time.seconds + time.nanos / 1e9, UTC),
        size=content.ByteSize(),
        ack_id=delivery.ack_id,
        content=content,
    )


def _confirmation(interruption: Interruption | None) -> Callable[[], None] | None:
    return None if interruption is None else partial(setattr, interruption, "confirmed", True)


def _warnings(path: str, subscription: Any) -> list[str]:
    """Return what is wrong with a subscription that works, but not as a consumer expects."""
    if subscription is None:  # this identity may not read it
        return []
    warnings = []
    if not subscription.enable_message_ordering:
        warnings.append(
            f"{path} has no message ordering: events of one key may be handled out of order. Ordering can't be enabled "
            "later; create another subscription with --enable-message-ordering"
        )
    if subscription.dead_letter_policy.dead_letter_topic:
        warnings.append(
            f"{path} has a dead-letter topic of its own, which breaks the order of a key and takes events before their "
            "last attempt: remove it with --clear-dead-letter-policy"
        )
    if subscription.enable_message_ordering and not subscription.HasField("retry_policy"):
        warnings.append(
            f"{path} has no retry policy: messages that are given back return at once, again and again. Set "
            "--min-retry-delay=1s --max-retry-delay=10s"
        )
    return warnings
