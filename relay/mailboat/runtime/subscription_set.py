"""The subscription set of a relay: subscriptions built to run, and failed ones with the reason.

A relay that follows its configuration builds one set after another. An unchanged subscription keeps its sink and thus
the connections to the destination. A subscription that can't be built does not affect the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mailboat.errors import ConfigError, NotInThisRelease
from mailboat.runtime.condition_reasons import reason_for
from mailboat.runtime.manifest_files import not_in_this_release
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.stream_parts import StreamParts, build, sink_context
from mailboat.sinks.protocol import Sink
from mailboat_spec import EventSubscription, Reason, SpecError, full_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InvalidSubscription:
    """A subscription that could not be built."""

    resource: EventSubscription
    error: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class SubscriptionSet:
    """Subscription set by name. Each subscription is either in ``parts`` or in ``failed``."""

    parts: Mapping[str, StreamParts] = field(default_factory=dict)
    failed: Mapping[str, InvalidSubscription] = field(default_factory=dict)

    def replaced_by(self, after: SubscriptionSet) -> list[Sink]:
        """Return the sinks that ``after`` no longer uses."""
        return [parts.sink for parts in self.parts.values() if not after.uses(parts.sink)]

    def uses(self, sink: Sink) -> bool:
        return any(parts.sink is sink for parts in self.parts.values())


def build_subscriptions(subscriptions: Iterable[EventSubscription], secrets: Secrets) -> SubscriptionSet:
    """Build all subscriptions or raise ``ConfigError``: for a relay whose manifests are fixed before a restart."""
    return SubscriptionSet({full_name(each): build(each, secrets) for each in subscriptions})


def rebuild_subscriptions(
    subscriptions: Iterable[EventSubscription], secrets: Secrets, before: SubscriptionSet
) -> SubscriptionSet:
    """Build the subscriptions and report those that can't be built as failed."""
    parts: dict[str, StreamParts] = {}
    failed: dict[str, InvalidSubscription] = {}
    for resource in subscriptions:
        name = full_name(resource)
        try:
            parts[name] = _build(resource, secrets, before.parts.get(name))
        except ConfigError as error:
            failed[name] = InvalidSubscription(resource, str(error), reason_for(error))
        except Exception as error:  # an error of a third-party sink must not affect the others
            log.exception("Sink could not be built", extra={"subscription": name})
            message = f"{name}: its sink could not be built: {type(error).__name__}; see the log"
            failed[name] = InvalidSubscription(resource, message, Reason.SINK_NOT_SUPPORTED)
        if name in failed and before.failed.get(name) != failed[name]:
            log.error("Subscription can't run: %s", failed[name].error, extra={"subscription": name})
    return SubscriptionSet(parts, failed)


def _build(resource: EventSubscription, secrets: Secrets, before: StreamParts | None) -> StreamParts:
    if problems := tuple(not_in_this_release(resource)):
        raise NotInThisRelease(str(SpecError(problems)))
    return build(resource, secrets, before)


def needs_new_secrets(subscription_set: SubscriptionSet, secrets: Secrets) -> bool:
    """Return whether a subscription must be rebuilt for a changed secret, or a failed one may succeed now.

    A removed secret is no reason to rebuild: a running subscription continues with the values it has.
    """
    if subscription_set.failed:
        return True
    for parts in subscription_set.parts.values():
        try:
            if sink_context(parts.resource, secrets) != parts.context:
                return True
        except ConfigError:
            continue
    return False
