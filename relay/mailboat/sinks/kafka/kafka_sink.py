"""The Kafka sink: one topic, over consecutive sessions, shared by all partitions of a subscription.

After a failure that it caused, a sink uses separate sessions for a while, so that it does not end shared ones
(``cluster``). A message whose refusal must be definite is sent in a separate session as well. Messages for another
topic (dead letters) use a nested sink: a missing topic must not end the session of all other messages.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, Self

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided
from mailboat.model import Message
from mailboat.sinks.kafka.cluster import NOT_ACCEPTED, Cluster, SharedProducer, TopicFacts, cluster_of
from mailboat.sinks.kafka.kafka_errors import RefusedTogether, no_answer
from mailboat.sinks.kafka.librdkafka_settings import Settings, check_settings, client_settings, masked_error
from mailboat.sinks.kafka.producer_share import ProducerShare, PublishCall
from mailboat.sinks.key_fence import FenceTicket, KeyFence
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, SinkContext, Traits

_OPEN_TIMEOUT: Final = 10.0
_REFRESH: Final = 300.0
_OUTDATED_AFTER: Final = 10.0
"""Seconds after which the cached topic limit is too old to give up an event for good."""
_REPLAY_OUTDATED_AFTER: Final = 1.0
"""The same for a replayed event: the limit may have been raised just before the replay."""
_UNSHARED_FOR: Final = 600.0
"""Seconds during which a sink shares no session after a failure that it caused."""
_BATCH_OVERHEAD: Final = 128
_HEADER_OVERHEAD: Final = 10
"""Upper bounds of the bytes that Kafka's record format adds to a message and to each header."""
_CLOSE_TIMEOUT: Final = 5.0
_LAST_ANSWERS: Final = 3.0
"""Seconds for answers to what is on the wire when a call is cancelled; less than the rest of a lease at that time."""

_topic_of: Final = attrgetter("topic")


@dataclass(eq=False, repr=False)
class KafkaSink:
    """Idempotent producer with acks=all; chooses the same partition per key as a Java producer."""

    traits = Traits(header_prefix="ce_", stops_behind_failure=True)

    topic: str
    client: Settings
    _: KW_ONLY
    delivery_timeout: float
    secrets: Sequence[str] = ()
    """Values of the client settings that must not appear in any error message."""
    opens_by_itself: bool = False

    def __post_init__(self) -> None:
        self._topic_sinks: dict[str, Self] = {}
        """Sinks for other topics, created and opened with their first message."""
        self._bootstrap: str = self.client["bootstrap.servers"]
        self._facts: TopicFacts | None = None
        self._requested_at = self._limit_at = 0.0
        """Time of the last metadata request, and of the last one that returned the maximum message size."""
        self._refresh_task: asyncio.Task[None] | None = None
        self._cluster: Cluster | None = None
        self._producer: SharedProducer | None = None
        self._share: ProducerShare | None = None
        self._unshared: asyncio.TimerHandle | None = None
        """Timer that is set while this sink shares no session."""
        self._closing: set[asyncio.Future[None]] = set()
        """Ends of former producers."""
        self._turn = asyncio.Lock()
        self._fence = KeyFence()
        self._closed = False

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        """Build the sink from ``mailboat_spec.KafkaSink``. Raises ``ConfigError`` for unusable settings."""
        client = client_settings(config.bootstrap_servers, config.config, context)
        check_settings(client, context)
        secrets = tuple(context.secrets.values())
        return cls(config.topic, client, delivery_timeout=context.delivery_timeout, secrets=secrets)

    async def open(self) -> None:
        self._closed = False
        if self._facts is None:  # every session of a relay opens its sinks, including those that are already open
            self._set_facts(await self._describe())
        async with self._turn:
            await self._ready_share()  # a new producer needs half a second to log in

    def refusal(self, message: Message) -> EventRefused | None:
        facts = self._facts
        _, key, value, headers, other_topic = message
        if facts is None or other_topic is not None:
            return None  # the limit of a dead-letter topic is not known here; the broker decides
        if key is None and facts.compacted:
            return EventRefused(
                f"topic {self.topic} is compacted and takes no message without a key; emit the event with a key, "
                "or change the topic's cleanup.policy",
                reason="NoKey",
                retryable=False,
            )
        size = len(value or b"") + len(key or "")
        if facts.max_message_bytes is None or size <= facts.max_message_bytes // 2:
            return None  # headers may still exceed the limit: librdkafka counts them and refuses before it sends
        size += len((key or "").encode(errors="replace")) - len(key or "") + _BATCH_OVERHEAD
        size += sum(len(name.encode()) + len(text.encode()) + _HEADER_OVERHEAD for name, text in headers.items())
        if size <= facts.max_message_bytes:
            return None
        # The limit may have been raised since the last metadata request: repeat the request before giving up the event.
        return EventRefused(
            f"the message has {size} bytes, topic {self.topic} takes {facts.max_message_bytes}; "
            "raise max.message.bytes of the topic, or emit smaller events",
            reason="TooLarge",
            retryable=self._outdated(_REPLAY_OUTDATED_AFTER if "mailboat-replay" in headers else _OUTDATED_AFTER),
        )

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        if any(map(_topic_of, batch)):
            return self._publish_by_topic(batch)
        return self._publish(batch, FenceTicket(self._fence))

    async def _publish_by_topic(self, batch: Sequence[Message]) -> Failures:
        """Publish topic by topic and stop at the first failure: order per key holds across topics as well."""
        failures: dict[int, DeliveryError] = {}
        for topic, run in groupby(enumerate(batch), key=lambda numbered: numbered[1].topic):
            indexes, messages = zip(*run, strict=True)
            if failures or self._closed:
                closed, undecided = SinkUnavailable("the sink is closed"), Undecided("what is before it failed")
                failures.update(dict.fromkeys(indexes, closed if self._closed else undecided))
                continue
            sink = self if topic is None else self._for(topic)
            answer = await sink.publish([message._replace(topic=None) for message in messages])
            failures.update((indexes[index], error) for index, error in answer.items())
        return failures or ALL_DELIVERED

    async def check_topic(self, topic: str) -> None:
        await self._for(topic)._describe()

    def _for(self, topic: str) -> Self:
        if topic not in self._topic_sinks:
            self._topic_sinks[topic] = replace(self, topic=topic, opens_by_itself=True)
        return self._topic_sinks[topic]

    async def _publish(self, batch: Sequence[Message], hold: FenceTicket) -> Failures:
        deadline = asyncio.get_running_loop().time() + self.delivery_timeout
        with hold:
            failures = await self._deliver(batch, hold, deadline)
            if len(batch) == 1 and isinstance(failures.get(0), RefusedTogether) and hold.is_sole(batch[0].key):
                # The Kafka batch had other messages. A batch of one needs a definite result: send it again, alone.
                failures = await self._deliver(batch, hold, deadline, alone=True)
            return failures

    async def close(self) -> None:
        self._closed = True
        for other in self._topic_sinks.values():
            await other.close()
        self._topic_sinks.clear()
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)
            self._refresh_task = None
        if self._unshared is not None:
            self._unshared.cancel()
            self._unshared = None
        if (share := self._share) is not None:
            if share.calls:
                share.stop(SinkUnavailable("the sink was closed"))
                await share.session.drained.wait()
            self._leave(share)
        self._facts = self._producer = self._cluster = None
        closing, self._closing = self._closing, set()
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_TIMEOUT)

    async def _deliver(
        self, batch: Sequence[Message], hold: FenceTicket, deadline: float, *, alone: bool = False
    ) -> Failures:
        call: PublishCall | None = None
        try:
            async with asyncio.timeout_at(deadline):
                async with self._turn:
                    share = await self._ready_share(alone=alone)
                    hold.begin()
                    call = share.begin(batch, hold)
                    await share.hand_over(call, alone=alone)
                    if alone:
                        await call.done.wait()
                await call.done.wait()
        except TimeoutError:
            if call is None:
                return hold.fail(batch, range(len(batch)), self._no_answer(self._share))
            reason = self._no_answer(call.share)
            if not call.share.withdraw(call, reason):
                call.share.time_out(call, reason)
            await call.done.wait()
        except asyncio.CancelledError:
            if call is not None and not call.done.is_set() and not call.share.withdraw(call, Undecided("cancelled")):
                call.share.stop(Undecided("another delivery of this sink was cancelled"), in_flight=False)
                # Messages on the wire may still be acknowledged. If they are not soon, they must neither delay the
                # next session nor be sent again after another relay took over.
                loop = asyncio.get_running_loop()
                loop.call_at(min(deadline, loop.time() + _LAST_ANSWERS), call.share.session.stop)
            hold.fail(batch, range(len(batch)), Undecided("cancelled"))
            raise
        except SinkUnavailable as error:
            return hold.fail(batch, range(len(batch)), error)
        return call.failures or ALL_DELIVERED

    async def _ready_share(self, *, alone: bool = False) -> ProducerShare:
        """Return the current share, or a new one after the last one has drained. ``alone``: wait for an empty share."""
        if self._closed:
            raise SinkUnavailable("the sink is closed")
        if self._facts is None:
            if not self.opens_by_itself:
                raise SinkUnavailable("the sink is not open")
            self._set_facts(await self._describe())
        self._refresh_if_older(_REFRESH)
        if alone:
            self._stop_sharing()
        while (share := self._share) is not None:
            if share.session.stopped:
                await share.session.drained.wait()
            if share.at_fault:
                self._stop_sharing()
            if not share.calls and not self._suits(share):
                self._leave(share)
            elif share.calls and (alone or not self._suits(share)):
                await share.idle()
            else:
                break
        if self._closed or self._producer is None or self._facts is None:  # closed meanwhile: a new share would leak
            raise SinkUnavailable("the sink is closed")
        if share is None:
            try:
                share = self._share = self._producer.join(self.topic, separate=self._unshared is not None)
            except NOT_ACCEPTED as error:
                raise self._not_accepted(error) from None
        share.proven_partitions.widen(self._facts.partitions)
        return share

    def _suits(self, share: ProducerShare) -> bool:
        return self._producer is not None and self._producer.suits(share, separate=self._unshared is not None)

    def _leave(self, share: ProducerShare) -> None:
        """Leave a share without calls in flight."""
        self._share = None
        share.session.leave(share)
        if (closing := share.session.closing) is not None:
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _stop_sharing(self) -> None:
        if self._unshared is not None:
            self._unshared.cancel()
        self._unshared = asyncio.get_running_loop().call_later(_UNSHARED_FOR, self._share_again)

    def _share_again(self) -> None:
        self._unshared = None
        share = self._share
        if share is not None and not share.calls and not self._suits(share) and not self._turn.locked():
            self._leave(share)  # otherwise its producer would be kept until the next message

    def _brokers(self) -> Cluster:
        if self._cluster is None:
            self._cluster = cluster_of(self.client)
        return self._cluster

    async def _describe(self) -> TopicFacts:
        response = self._brokers().describe(self.topic, min(_OPEN_TIMEOUT, self.delivery_timeout))
        try:
            return await asyncio.shield(response)
        except NOT_ACCEPTED as error:
            raise self._not_accepted(error) from None

    def _not_accepted(self, error: Exception) -> SinkUnavailable:
        """Return the error for a client that can't be created. The settings were valid when the sink was built."""
        return SinkUnavailable(
            f"no client for Kafka at {self._bootstrap} can be made: {masked_error(error, self.secrets)}; has the "
            "relay enough memory, threads and file descriptors?"
        )

    def _outdated(self, after: float) -> bool:
        """Return whether the cached limit may be outdated, and request it again. Without a result it stays outdated."""
        self._refresh_if_older(after)
        return asyncio.get_running_loop().time() - self._limit_at > after

    def _refresh_if_older(self, after: float) -> None:
        if asyncio.get_running_loop().time() - self._requested_at <= after:
            return
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._refresh(), name=f"describe {self.topic}")

    async def _refresh(self) -> None:
        try:
            self._set_facts(await self._describe())
        except SinkUnavailable:
            self._requested_at = asyncio.get_running_loop().time()  # the next ``publish`` reports the failure

    def _set_facts(self, facts: TopicFacts) -> None:
        self._requested_at = asyncio.get_running_loop().time()
        if facts.max_message_bytes is not None:
            self._limit_at = self._requested_at
        elif self._facts is not None:
            facts = replace(self._facts, partitions=facts.partitions)  # the limits are unknown now: keep the last ones
        self._facts = facts
        self._producer = self._brokers().producer(facts.max_message_bytes, self.delivery_timeout)

    def _no_answer(self, share: ProducerShare | None) -> SinkUnavailable:
        return no_answer(self._bootstrap, self.delivery_timeout, None if share is None else share.session.client_error)
