"""The Kafka sink: one session after the other, shared by all partitions of a subscription."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Self

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided
from mailboat.events import Outgoing
from mailboat.sinks.kafka.errors import RefusedTogether, no_answer
from mailboat.sinks.kafka.session import Session
from mailboat.sinks.kafka.settings import check_settings, client_settings, producer_settings
from mailboat.sinks.kafka.topic import TopicFacts, describe_topic
from mailboat.sinks.key_stops import CallHold, KeyStops
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, SinkContext, Traits

_OPEN_TIMEOUT: Final = 10.0
_REFRESH: Final = 300.0
_MAX_SESSION_AGE: Final = 6 * 3600.0
"""Brokers forget a producer that is silent for a day, and with it the sequence numbers that order rests on."""
_BATCH_OVERHEAD: Final = 128
_HEADER_OVERHEAD: Final = 10
"""What Kafka's record format adds to the bytes of a message, and to each header, at most."""
_JOIN_TIMEOUT: Final = 5.0
_NO_NEWS: Final = (
    "enable.gapless.guarantee is experimental",  # known, and tried
    "unable to satisfy gap-less guarantee",  # how a session ends when a message is refused; the answer says so
    "not found in cache",  # a partition without a leader just now, once per partition and refresh
)
"""What librdkafka logs and nobody needs to read."""


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(known in text for known in _NO_NEWS)


logger = logging.getLogger(__name__)
logger.addFilter(_is_news)


class KafkaSink:
    """Idempotent, acknowledged by all replicas in sync, the same partition per key as a Java producer."""

    traits = Traits(header_prefix="ce_", stops_behind_failure=True)

    def __init__(self, topic: str, client: dict[str, Any], *, delivery_timeout: float) -> None:
        self._topic = topic
        self._client = client
        self._bootstrap: str = client["bootstrap.servers"]
        self._delivery_timeout = delivery_timeout
        self._facts: TopicFacts | None = None
        self._asked_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._renew = False
        self._retired: list[Session] = []
        self._turn = asyncio.Lock()
        self._stops = KeyStops()
        self._closed = False

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        """From ``mailboat_spec.KafkaSink``. Raises ``ConfigError`` for settings that can't be used."""
        client = client_settings(config.bootstrap_servers, config.config, context)
        check_settings(client, context)
        return cls(config.topic, client, delivery_timeout=context.delivery_timeout)

    async def open(self) -> None:
        self._closed = False
        self._learn(await self._describe())
        async with self._turn:
            await self._ready_session(alone=False)  # the client needs half a second to log in as a producer

    def refusal(self, message: Outgoing) -> EventRefused | None:
        facts = self._facts
        if facts is None or message.topic is not None:
            return None  # what a dead-letter topic takes is not known here; the broker says
        key = message.key
        if key is None and facts.compacted:
            return EventRefused(
                f"topic {self._topic} is compacted and takes no message without a key; emit the event with a key, "
                "or change the topic's cleanup.policy",
                reason="NoKey",
                retryable=False,
            )
        size = len(message.value or b"") + len(key or "")
        if size <= facts.max_message_bytes // 2:
            return None  # headers may still be too much: librdkafka counts them, and a session refuses before it sends
        size += len((key or "").encode(errors="replace")) - len(key or "") + _BATCH_OVERHEAD
        size += sum(len(name.encode()) + len(value.encode()) + _HEADER_OVERHEAD for name, value in message.headers)
        if size <= facts.max_message_bytes:
            return None
        return EventRefused(
            f"the message has {size} bytes, topic {self._topic} takes {facts.max_message_bytes}; "
            "raise max.message.bytes of the topic, or emit smaller events",
            reason="TooLarge",
            retryable=False,
        )

    def publish(self, batch: Sequence[Outgoing]) -> Coroutine[Any, Any, Failures]:
        return self._publish(batch, self._stops.call())

    async def _publish(self, batch: Sequence[Outgoing], hold: CallHold) -> Failures:
        if not batch:
            return ALL_DELIVERED
        deadline = asyncio.get_running_loop().time() + self._delivery_timeout
        with hold:
            failures = await self._deliver(batch, hold, deadline)
            if len(batch) == 1 and isinstance(failures.get(0), RefusedTogether) and hold.is_sole(batch[0].key):
                # Others were in the same Kafka batch. A batch of one gets a definite answer: once more, by itself.
                failures = await self._deliver(batch, hold, deadline, alone=True)
            return failures

    async def close(self) -> None:
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
            self._refreshing = None
        session, self._session = self._session, None
        if session is not None:
            session.stop(SinkUnavailable("the sink was closed"))
            await session.drained.wait()
            self._retired.append(session)
        retired, self._retired = self._retired, []
        for gone in retired:
            await asyncio.to_thread(gone.join, _JOIN_TIMEOUT)

    async def _deliver(
        self, batch: Sequence[Outgoing], hold: CallHold, deadline: float, *, alone: bool = False
    ) -> Failures:
        session = call = None
        try:
            async with asyncio.timeout_at(deadline):
                async with self._turn:
                    session = await self._ready_session(alone)
                    hold.begin()
                    call = session.begin(batch, hold)
                    await session.hand_over(call, alone=alone)
                    if alone:
                        await call.done.wait()
                await call.done.wait()
        except TimeoutError:
            if session is None or call is None:
                return self._none_of(batch, hold, self._no_answer(self._session))
            session.stop(self._no_answer(session))
            await call.done.wait()
        except asyncio.CancelledError:
            if session is not None and call is not None and not call.done.is_set():
                session.stop(Undecided("another delivery of this sink was cancelled"), in_flight=False)
                # What is on the wire may be answered for; where nobody answers, it must not hold up the next session.
                asyncio.get_running_loop().call_at(deadline, session.stop)
            self._none_of(batch, hold, Undecided("cancelled"))
            raise
        except SinkUnavailable as error:
            return self._none_of(batch, hold, error)
        return call.failures or ALL_DELIVERED

    async def _ready_session(self, alone: bool) -> Session:
        """The living session, or a new one once the last one has given all its answers."""
        if self._closed:
            raise SinkUnavailable("the sink is closed")
        if self._facts is None:
            raise SinkUnavailable("the sink is not open")
        now = asyncio.get_running_loop().time()
        if now - self._asked_at > _REFRESH:
            self._asked_at = now
            self._refreshing = asyncio.create_task(self._refresh(), name=f"describe {self._topic}")
        session = self._session
        if session is not None:
            if session.stopped:
                await session.drained.wait()
            elif alone:
                await session.idle()
            elif self._renew or now - session.started_at > _MAX_SESSION_AGE:
                await session.idle()
                session.retire()
            if not session.stopped:
                return session
            self._retired = [gone for gone in self._retired if not gone.gone] + [session]
        self._renew = False
        self._session = Session(
            producer_settings(self._client, max_message_bytes=self._facts.max_message_bytes),
            self._topic,
            self._facts.partitions,
            logger=logger,
        )
        return self._session

    async def _describe(self) -> TopicFacts:
        timeout = min(_OPEN_TIMEOUT, self._delivery_timeout)
        return await asyncio.to_thread(describe_topic, self._client, self._topic, timeout=timeout)

    async def _refresh(self) -> None:
        try:
            self._learn(await self._describe())
        except SinkUnavailable:
            pass  # whoever publishes will say so

    def _learn(self, facts: TopicFacts) -> None:
        self._renew = self._facts is not None and facts != self._facts
        self._facts = facts
        self._asked_at = asyncio.get_running_loop().time()

    def _no_answer(self, session: Session | None) -> SinkUnavailable:
        return no_answer(self._bootstrap, self._delivery_timeout, None if session is None else session.complaint)

    def _none_of(self, batch: Sequence[Outgoing], hold: CallHold, error: DeliveryError) -> Failures:
        for message in batch:
            hold.stop(message.key)
        return dict.fromkeys(range(len(batch)), error)
