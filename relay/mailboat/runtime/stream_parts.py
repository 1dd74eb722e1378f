"""Sink, encoder and policy of an EventSubscription, as its workers need them.

They live as long as the relay, so a database outage does not reconnect the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from mailboat.cloudevents import MessageEncoder
from mailboat.delivery.backoff import Backoff, RetryPolicy
from mailboat.delivery.checkpoints import Passing
from mailboat.delivery.stream import Clock, Stream, StreamSettings
from mailboat.errors import ConfigError
from mailboat.runtime.secrets import Secrets
from mailboat.sinks.protocol import Sink, SinkContext
from mailboat.sinks.registry import build_sink
from mailboat.store.outbox_store import Subscription
from mailboat_spec import EventSubscription, EventSubscriptionSpec, OnExhausted, Ordering, SecretKeyRef, full_name


@dataclass(frozen=True, slots=True)
class StreamParts:
    """Parts of a subscription that outlive database connections."""

    resource: EventSubscription
    sink: Sink
    context: SinkContext
    encoder: MessageEncoder
    settings: StreamSettings

    @property
    def name(self) -> str:
        return full_name(self.resource)

    @property
    def pulled(self) -> bool:
        """Whether the subscription is a pull subscription, whose partitions belong to consumers."""
        return self.resource.spec.sink.pull is not None

    def continues(self, before: StreamParts) -> bool:
        """Return whether the delivery started with ``before`` can continue unchanged. A pause does not interrupt it."""
        mine, its = self.resource, before.resource
        same_spec = mine.spec == its.spec.model_copy(update={"state": mine.spec.state})
        return same_spec and mine.metadata.uid == its.metadata.uid and self.sink is before.sink

    def stream(self, subscription: Subscription, clock: Clock, random: Random, passing: Passing) -> Stream:
        """Create the stream for one connected period."""
        return Stream(
            subscription.number,
            self.name,
            subscription.generation,
            self.sink,
            self.encoder,
            self.settings,
            pulled=self.pulled,
            dead_letter_topic=self.resource.dead_letter_topic,
            clock=clock,
            random=random,
            passing=passing,
        )


def build(resource: EventSubscription, secrets: Secrets, before: StreamParts | None = None) -> StreamParts:
    """Build the parts of a subscription. If sink and context are unchanged, keep the sink of ``before``.

    Raise ``ConfigError`` if the manifest can't be satisfied.
    """
    spec = resource.spec
    try:
        context = sink_context(resource, secrets)
    except ConfigError:
        if before is None or before.resource.spec.sink != spec.sink:
            raise
        # The secret was removed: continue with the previous values.
        context = SinkContext(before.context.subscription, spec.delivery.timeout.seconds, before.context.secrets)
    fits = before is not None and (before.resource.spec.sink, before.context) == (spec.sink, context)
    sink = before.sink if before is not None and fits else build_sink(spec.sink, context)
    # The source of an event is the outbox it was written to, independent of the subscription.
    outbox = f"mailboat/{resource.metadata.namespace}/{spec.relay}"
    encoder = MessageEncoder(spec.format, source=outbox, header_prefix=sink.traits.header_prefix)
    settings = StreamSettings(
        batch_size=spec.batch_size,
        timeout=spec.delivery.timeout.seconds,
        policy=policy(spec),
        ordered=spec.ordering is Ordering.KEY,
    )
    return StreamParts(resource, sink, context, encoder, settings)


def sink_context(resource: EventSubscription, secrets: Secrets) -> SinkContext:
    """Return the context of the sink: name, timeout and secrets. Raise ``ConfigError`` if a secret is missing."""
    timeout = resource.spec.delivery.timeout.seconds
    return SinkContext(full_name(resource), timeout, _sink_secrets(resource, secrets))


def policy(spec: EventSubscriptionSpec) -> RetryPolicy:
    """Convert ``spec.delivery`` to the retry policy."""
    delivery, backoff = spec.delivery, spec.delivery.backoff
    return RetryPolicy(
        spec.max_attempts,
        Backoff(backoff.initial.seconds, backoff.factor, backoff.max.seconds, backoff.jitter),
        dead_letters=delivery.on_exhausted is OnExhausted.DEAD_LETTER,
    )


def _sink_secrets(resource: EventSubscription, secrets: Secrets) -> dict[str, str]:
    found: dict[str, str] = {}
    for reference in resource.spec.sink.chosen.secret_refs():
        if isinstance(reference, SecretKeyRef):
            found[reference.key] = secrets.read(reference.name, reference.key)
        else:
            found |= secrets.all(reference.name)
    return found
