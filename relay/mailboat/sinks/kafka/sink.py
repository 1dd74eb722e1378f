"""The Kafka sink: one session after the other, shared by all partitions of a subscription.

Messages for another topic, which are dead letters, have a sink of their own inside of this one: a dead-letter topic
that is missing must not end the session that everything else is on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, Self

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided
from mailboat.events import Outgoing
from mailboat.sinks.kafka.errors import RefusedTogether, no_answer
from mailboat.sinks.kafka.session import Session
from mailboat.sinks.kafka.settings import check_settings, client_settings, objection, producer_settings
from mailboat.sinks.kafka.topic import NOT_ACCEPTED, TopicFacts, describe_topic
from mailboat.sinks.key_stops import CallHold, KeyStops
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, SinkContext, Traits
from mailboat.sinks.threads import in_a_thread

_OPEN_TIMEOUT: Final = 10.0
_REFRESH: Final = 300.0
_DOUBTFUL: Final = 10.0
"""Seconds after which what is known of the topic is not enough to give up an event for good."""
_DOUBTFUL_FOR_REPLAY: Final = 1.0
"""For one that somebody brings back, who may have raised the limit just before."""
_MAX_SESSION_AGE: Final = 6 * 3600.0
"""Brokers forget a producer that is silent for a day, and with it the sequence numbers that order rests on."""
_BATCH_OVERHEAD: Final = 128
_HEADER_OVERHEAD: Final = 10
"""What Kafka's record format adds to the bytes of a message, and to each header, at most."""
_JOIN_TIMEOUT: Final = 5.0
_NO_NEWS: Final = (
    "enable.gapless.guarantee is experimental",  # known, and tried
    "FAIL [",  # a connection, at every attempt of every client; the sink says once that it is away, and why
    "unable to satisfy gap-less guarantee",  # how a session ends when a message is refused; the answer says so
    "not found in cache",  # a partition without a leader just now, once per partition and refresh
)
"""What librdkafka logs and nobody needs to read."""


_topic_of: Final = attrgetter("topic")


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(known in text for known in _NO_NEWS)


logger = logging.getLogger(__name__)
logger.addFilter(_is_news)


class KafkaSink:
    """Idempotent, acknowledged by all replicas in sync, the same partition per key as a Java producer."""

    traits = Traits(header_prefix="ce_", stops_behind_failure=True)

    def __init__(
        self,
        topic: str,
        client: dict[str, Any],
        *,
        delivery_timeout: float,
        secrets: Sequence[str] = (),
        opens_by_itself: bool = False,
    ) -> None:
        """``secrets``: those of the client's settings that must not be in any message."""
        self._topic = topic
        self._secrets = secrets
        self._opens_by_itself = opens_by_itself
        self._others: dict[str, KafkaSink] = {}
        """Sinks for other topics, made and opened when the first message is for them."""
        self._client = client
        self._bootstrap: str = client["bootstrap.servers"]
        self._delivery_timeout = delivery_timeout
        self._facts: TopicFacts | None = None
        self._asked_at = self._told_at = 0.0
        """When the brokers were last asked about the topic, and when they last said how large a message may be."""
        self._describing: asyncio.Future[TopicFacts] | None = None
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
        secrets = tuple(context.secrets.values())
        return cls(config.topic, client, delivery_timeout=context.delivery_timeout, secrets=secrets)

    async def open(self) -> None:
        self._closed = False
        if self._facts is None:  # every session of a relay opens its sinks, also those that have been open all the time
            self._learn(await self._describe())
        async with self._turn:
            await self._ready_session(alone=False)  # the client needs half a second to log in as a producer

    def refusal(self, message: Outgoing) -> EventRefused | None:
        facts = self._facts
        _, key, value, headers, other_topic = message
        if facts is None or other_topic is not None:
            return None  # what a dead-letter topic takes is not known here; the broker says
        if key is None and facts.compacted:
            return EventRefused(
                f"topic {self._topic} is compacted and takes no message without a key; emit the event with a key, "
                "or change the topic's cleanup.policy",
                reason="NoKey",
                retryable=False,
            )
        size = len(value or b"") + len(key or "")
        if facts.max_message_bytes is None or size <= facts.max_message_bytes // 2:
            return None  # headers may still be too much: librdkafka counts them, and a session refuses before it sends
        size += len((key or "").encode(errors="replace")) - len(key or "") + _BATCH_OVERHEAD
        size += sum(len(name.encode()) + len(text.encode()) + _HEADER_OVERHEAD for name, text in headers.items())
        if size <= facts.max_message_bytes:
            return None
        # The limit may have been raised since it was asked for: it is asked for anew before the event is given up.
        return EventRefused(
            f"the message has {size} bytes, topic {self._topic} takes {facts.max_message_bytes}; "
            "raise max.message.bytes of the topic, or emit smaller events",
            reason="TooLarge",
            retryable=self._doubtful(_DOUBTFUL_FOR_REPLAY if "mailboat-replay" in headers else _DOUBTFUL),
        )

    def publish(self, batch: Sequence[Outgoing]) -> Coroutine[Any, Any, Failures]:
        if any(map(_topic_of, batch)):
            return self._publish_by_topic(batch)
        return self._publish(batch, self._stops.call())

    async def _publish_by_topic(self, batch: Sequence[Outgoing]) -> Failures:
        """Topic by topic, as long as all arrives: order per key counts across topics as well."""
        failures: dict[int, DeliveryError] = {}
        for topic, run in groupby(enumerate(batch), key=lambda numbered: numbered[1].topic):
            indexes, messages = zip(*run, strict=True)
            if failures or self._closed:
                reason = (
                    SinkUnavailable("the sink is closed") if self._closed else Undecided("what is before it failed")
                )
                failures.update(dict.fromkeys(indexes, reason))
                continue
            sink = self if topic is None else self._for(topic)
            answer = await sink.publish([message._replace(topic=None) for message in messages])
            failures.update((indexes[index], error) for index, error in answer.items())
        return failures or ALL_DELIVERED

    def _for(self, topic: str) -> KafkaSink:
        if topic not in self._others:
            self._others[topic] = KafkaSink(
                topic,
                self._client,
                delivery_timeout=self._delivery_timeout,
                secrets=self._secrets,
                opens_by_itself=True,
            )
        return self._others[topic]

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
        for other in self._others.values():
            await other.close()
        self._others.clear()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
            self._refreshing = None
        session, self._session = self._session, None
        if session is not None:
            session.stop(SinkUnavailable("the sink was closed"))
            await session.drained.wait()
            self._retired.append(session)
        self._facts = None
        retired, self._retired = self._retired, []
        for gone in retired:
            await in_a_thread(partial(gone.join, _JOIN_TIMEOUT), "kafka-join")

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
            if not self._opens_by_itself:
                raise SinkUnavailable("the sink is not open")
            self._learn(await self._describe())
            assert self._facts is not None
        self._ask_anew(_REFRESH)
        now = asyncio.get_running_loop().time()
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
        if self._closed or self._facts is None:  # meanwhile: nobody would ever close a session that is made now
            raise SinkUnavailable("the sink is closed")
        self._renew = False
        settings = producer_settings(self._client, max_message_bytes=self._facts.max_message_bytes)
        try:
            self._session = Session(settings, self._topic, self._facts.partitions, logger=logger)
        except NOT_ACCEPTED as error:
            raise self._not_accepted(error) from None
        return self._session

    async def _describe(self) -> TopicFacts:
        """Whoever asks while somebody else does gets the same answer."""
        if self._describing is None or self._describing.done():
            timeout = min(_OPEN_TIMEOUT, self._delivery_timeout)
            ask = partial(describe_topic, self._client, self._topic, timeout=timeout)
            self._describing = in_a_thread(ask, "kafka-topic")
        try:
            return await asyncio.shield(self._describing)
        except NOT_ACCEPTED as error:
            raise self._not_accepted(error) from None

    def _not_accepted(self, error: Exception) -> SinkUnavailable:
        """The settings were fine when the sink was built, so what they refer to has changed since."""
        return SinkUnavailable(
            f"no client for Kafka at {self._bootstrap} can be made: {objection(error, self._secrets)}; are the files "
            "that spec.sink.kafka.config and the Secret of configSecretRef name still there, and readable?"
        )

    def _doubtful(self, after: float) -> bool:
        """Whether the limit may be another by now. Then it is asked for anew; no answer ends no doubt."""
        self._ask_anew(after)
        return asyncio.get_running_loop().time() - self._told_at > after

    def _ask_anew(self, after: float) -> None:
        """Begins to ask what the topic takes if the last time is that long ago."""
        if asyncio.get_running_loop().time() - self._asked_at <= after:
            return
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name=f"describe {self._topic}")

    async def _refresh(self) -> None:
        try:
            self._learn(await self._describe())
        except SinkUnavailable:
            self._asked_at = asyncio.get_running_loop().time()  # whoever publishes will say so

    def _learn(self, facts: TopicFacts) -> None:
        self._asked_at = asyncio.get_running_loop().time()
        if facts.max_message_bytes is not None:
            self._told_at = self._asked_at
        known = facts.since(self._facts)
        self._renew = self._renew or (self._facts is not None and known != self._facts)
        self._facts = known

    def _no_answer(self, session: Session | None) -> SinkUnavailable:
        return no_answer(self._bootstrap, self._delivery_timeout, None if session is None else session.complaint)

    def _none_of(self, batch: Sequence[Outgoing], hold: CallHold, error: DeliveryError) -> Failures:
        for message in batch:
            hold.stop(message.key)
        return dict.fromkeys(range(len(batch)), error)
