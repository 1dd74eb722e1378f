"""The subscription set of a relay: subscriptions built to run, and failed ones with the reason.

A relay that follows its configuration builds one set after another. An unchanged subscription keeps its sink and thus
the connections to the destination; a database outage does not reconnect the sinks either. A subscription that can't be
built does not affect the others.

A session opens each sink, then checks its dead-letter topic. Both are retried with back-off. Without the check, a
misspelled topic is reported with the first dead letter, which may be months later. Delivery does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from mailboat import errors
from mailboat.cloudevents import MessageEncoder
from mailboat.delivery.backoff import DEAD_TOPIC_BACKOFF, OUTAGE_BACKOFF, Backoff
from mailboat.delivery.counters import DeliveryHistograms
from mailboat.delivery.parked_keys import dead_letter_topic_error
from mailboat.delivery.publish import as_unavailable
from mailboat.delivery.stream import CheckpointHook, Stream, StreamSettings
from mailboat.errors import ConfigError, MailboatError, SinkUnavailable
from mailboat.runtime.secrets import Secrets
from mailboat.sinks.protocol import ChecksTopics, Sink, SinkContext
from mailboat.sinks.registry import build_sink
from mailboat.store.outbox_store import Subscription
from mailboat_spec import EventSubscription, Reason, SecretKeyRef, full_name

log = logging.getLogger(__name__)

# The first match wins, so subclasses come before their base class.
_REASONS: Final[tuple[tuple[type[MailboatError], Reason], ...]] = (
    (errors.SecretMissing, Reason.SECRET_NOT_FOUND),
    (errors.NoSuchSink, Reason.SINK_NOT_SUPPORTED),
    (ConfigError, Reason.INVALID_SPEC),
    (errors.SchemaMismatch, Reason.SCHEMA_MISMATCH),
    (errors.ForeignDatabase, Reason.FOREIGN_DATABASE),
    (errors.InRecovery, Reason.DATABASE_IN_RECOVERY),
)


def reason_for(error: MailboatError) -> Reason:
    """Return the reason for an error that keeps a relay or a subscription from running."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.DATABASE_UNREACHABLE)


@dataclass(frozen=True, slots=True)
class StreamParts:
    """Sink and encoder of a subscription, which outlive database connections."""

    resource: EventSubscription
    sink: Sink
    context: SinkContext
    encoder: MessageEncoder

    @property
    def name(self) -> str:
        return full_name(self.resource)

    @property
    def pulled(self) -> bool:
        """Whether the partitions belong to consumers."""
        return self.resource.spec.sink.pull is not None

    def continues(self, before: StreamParts) -> bool:
        """Return whether the delivery started with ``before`` can continue unchanged. A pause does not interrupt it."""
        new, old = self.resource, before.resource
        same_spec = new.spec == old.spec.model_copy(update={"state": new.spec.state})
        return same_spec and new.metadata.uid == old.metadata.uid and self.sink is before.sink

    def stream(
        self, subscription: Subscription, meters: DeliveryHistograms, random: Random, on_checkpoint: CheckpointHook
    ) -> Stream:
        spec, delivery, backoff = self.resource.spec, self.resource.spec.delivery, self.resource.spec.delivery.backoff
        settings = StreamSettings(
            spec.batch_size,
            delivery.timeout.seconds,
            spec.max_attempts,
            Backoff(backoff.initial.seconds, backoff.factor, backoff.max.seconds, backoff.jitter),
            dead_letters=delivery.on_exhausted == "DeadLetter",
            ordered=spec.ordering == "Key",
        )
        return Stream(
            subscription.number,
            self.name,
            subscription.generation,
            self.sink,
            self.encoder,
            settings,
            pulled=self.pulled,
            dead_letter_topic=self.resource.dead_letter_topic,
            random=random,
            on_checkpoint=on_checkpoint,
            meters=meters,
        )


@dataclass(frozen=True, slots=True)
class InvalidSubscription:
    resource: EventSubscription
    error: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class SubscriptionSet:
    """Each subscription is, by its name, either in ``parts`` or in ``failed``."""

    parts: Mapping[str, StreamParts] = field(default_factory=dict)
    failed: Mapping[str, InvalidSubscription] = field(default_factory=dict)

    def needs(self, secrets: Secrets) -> bool:
        """Return whether a subscription must be rebuilt for a changed secret, or a failed one may succeed now.

        A removed secret is no reason to rebuild: a running subscription continues with the values it has.
        """
        for parts in self.parts.values():
            with suppress(ConfigError):
                if _sink_context(parts.resource, secrets) != parts.context:
                    return True
        return bool(self.failed)


def build_subscriptions(
    subscriptions: Iterable[EventSubscription], secrets: Secrets, before: SubscriptionSet
) -> SubscriptionSet:
    parts: dict[str, StreamParts] = {}
    failed: dict[str, InvalidSubscription] = {}
    for resource in subscriptions:
        name = full_name(resource)
        try:
            parts[name] = build_subscription(resource, secrets, before.parts.get(name))
        except ConfigError as error:
            failed[name] = InvalidSubscription(resource, str(error), reason_for(error))
        except Exception as error:  # an error of a third-party sink must not affect the others
            log.exception("Sink could not be built", extra={"subscription": name})
            message = f"{name}: its sink could not be built: {type(error).__name__}; see the log"
            failed[name] = InvalidSubscription(resource, message, Reason.SINK_NOT_SUPPORTED)
        if name in failed and before.failed.get(name) != failed[name]:
            log.error("Subscription can't run: %s", failed[name].error, extra={"subscription": name})
    return SubscriptionSet(parts, failed)


def build_subscription(resource: EventSubscription, secrets: Secrets, before: StreamParts | None = None) -> StreamParts:
    """Return the parts of a subscription, with the sink of ``before`` if it is unchanged. May raise ``ConfigError``."""
    spec = resource.spec
    kept = before if before is not None and before.resource.spec.sink == spec.sink else None
    try:
        context = _sink_context(resource, secrets)
    except ConfigError:
        if kept is None:
            raise
        # The secret was removed: continue with the previous values.
        context = replace(kept.context, delivery_timeout=spec.delivery.timeout.seconds)
    sink = kept.sink if kept is not None and kept.context == context else build_sink(spec.sink, context)
    # The source of an event is the outbox it was written to, independent of the subscription.
    outbox = f"mailboat/{resource.metadata.namespace}/{spec.relay}"
    encoder = MessageEncoder(spec.format, source=outbox, header_prefix=sink.traits.header_prefix)
    return StreamParts(resource, sink, context, encoder)


def _sink_context(resource: EventSubscription, secrets: Secrets) -> SinkContext:
    """Raise ``ConfigError`` if a secret of the sink is missing."""
    found: dict[str, str] = {}
    for reference in resource.spec.sink.chosen.secret_refs():
        if isinstance(reference, SecretKeyRef):
            found[reference.key] = secrets.read(reference.name, reference.key)
        else:
            found |= secrets.all(reference.name)
    return SinkContext(full_name(resource), resource.spec.delivery.timeout.seconds, found)


async def open_sink(stream: Stream) -> None:
    """Open the sink of a stream. Report each failure in the status and retry."""
    failures = 0
    while not stream.ready:
        try:
            await stream.sink.open()
            stream.ready = True
            stream.health.reachable(stream.clock())
        except Exception as error:  # an unexpected error of a sink must not end the other subscriptions
            stream.health.unavailable(str(as_unavailable(stream, error)), stream.clock())
            failures += 1
            await asyncio.sleep(OUTAGE_BACKOFF.delay(failures, stream.random))


async def await_dead_letter_topic(stream: Stream) -> None:
    """Report a missing dead-letter topic in the status until it exists."""
    topic, sink, dead_topic = stream.dead_letter_topic, stream.sink, stream.dead_topic
    if topic is None or not isinstance(sink, ChecksTopics):
        return
    about = {"subscription": stream.name, "topic": topic}
    failures = 0
    while True:
        try:
            await sink.check_topic(topic)
            break
        except SinkUnavailable as error:
            message = dead_letter_topic_error(error)
            if failures == 0:
                log.warning("Dead-letter topic is not available: %s", message, extra=about)
            dead_topic.problem = dead_topic.problem or f"the dead-letter topic {topic} is not available: {message}"
        failures += 1
        await asyncio.sleep(DEAD_TOPIC_BACKOFF.delay(failures, stream.random))
    if failures > 0 and dead_topic.problem is not None:
        dead_topic.problem = None
        log.info("Dead-letter topic is available", extra=about)
