"""Observation: everything that one reconcile decides on, read once. The decisions on it are pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mailboat_operator.controller.parse import ParsedSubscription
from mailboat_operator.kube.client import Key, Object
from mailboat_operator.relays.assignment import Work
from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer
from mailboat_operator.resources.configmap import Configuration, Item, raw_item
from mailboat_operator.resources.deployment import selector_labels
from mailboat_operator.resources.pod import child_name, database_secrets, secrets_in, secrets_of, sink_secrets
from mailboat_spec import EventSubscription, OutboxRelay, Runtime
from mailboat_spec.names import RELAY_LABEL


@dataclass(frozen=True, slots=True)
class ObservedSubscription:
    """One subscription: its resource, and the form that relays are configured with."""

    parsed: ParsedSubscription
    subscription: EventSubscription | None
    """The spec, or its last valid form. None if that form can't be parsed, or if relays have none."""
    last_valid: Object | None = None
    """The last valid form, as relays have it, if the spec is invalid."""
    lost: bool = False
    """Relays have the subscription, but its last valid form can't be recovered."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Input of one reconcile: resource, subscriptions, pods and relay reports."""

    key: Key
    found: Object
    """The OutboxRelay, as the API server has it."""
    relay: OutboxRelay | None
    """None if the spec is invalid, for the reason in ``problem``."""
    problem: str
    configuration: Configuration | None
    """Configuration in the relay's ConfigMap."""
    subscriptions: Sequence[ObservedSubscription]
    pods: Sequence[RelayPod]
    polled: Sequence[RelayPod]
    """Pods that contain a relay and have not finished."""
    answers: Sequence[Answer]
    """One for each polled pod."""

    @property
    def name(self) -> str:
        return "/".join(self.key)

    @property
    def items(self) -> list[Item]:
        """One configuration item per subscription."""
        kept = [raw_item(each.last_valid) for each in self.subscriptions if each.last_valid is not None]
        valid = (each.parsed.item for each in self.subscriptions if each.last_valid is None)
        return [*kept, *(each for each in valid if each is not None)]

    @property
    def version_in_use(self) -> int:
        """Highest version of a configuration that relays report."""
        return max((each.report.config.version or 0 for each in self.answers if each.report is not None), default=0)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of all Secrets that relays must mount, including those of subscriptions that only relays can parse."""
        if self.relay is None:
            return ()
        parsed = [each.subscription for each in self.subscriptions if each.subscription is not None]
        unparsed = [each.last_valid for each in self.subscriptions if each.subscription is None]
        others = {name for form in unparsed if form is not None for name in secrets_in(form)}
        return tuple(sorted({*secrets_of(self.relay, parsed), *others}))

    @property
    def work(self) -> list[Work]:
        """Subscriptions to assign. Partitions of pull subscriptions belong to consumers."""
        if self.relay is None:
            return []
        found = [each.subscription for each in self.subscriptions if each.subscription is not None]
        return [_work(self.relay, each) for each in found if each.spec.sink.pull is None]

    @property
    def running_answers(self) -> list[Answer]:
        """Answers of pods that keep running. A stopping relay hands over its partitions: its report is outdated."""
        return [answer for pod, answer in zip(self.polled, self.answers, strict=True) if pod.alive]

    @property
    def hold_reason(self) -> str:
        """Why relays get no new configuration; empty if they do."""
        lost = [each.parsed.found["metadata"]["name"] for each in self.subscriptions if each.lost]
        if not lost:
            return ""
        return (
            f"Relays get no new configuration: the spec of EventSubscription {', '.join(lost)} is invalid, and the "
            f'ConfigMap "{child_name(self.key[1])}" does not have its last valid form any more. Without it relays '
            "would forget how far it has come. Mend that spec, or delete the EventSubscription."
        )

    @property
    def sidecar_works(self) -> bool:
        """Return whether the Deployment can be deleted after a change of the runtime to Sidecar.

        Application pods get their sidecar only when they are restarted. Until a sidecar works, deleting the Deployment
        would stop delivery.
        """
        return any(
            not pod.own
            and pod.alive
            and answer.report is not None
            and (report := answer.report.relay(self.name)) is not None
            and report.database_reachable
            for pod, answer in zip(self.polled, self.answers, strict=True)
        )

    @property
    def selector(self) -> str:
        """Label selector of the relay's pods, for the scale subresource."""
        sidecar = self.relay is not None and self.relay.spec.runtime is Runtime.SIDECAR
        labels = {RELAY_LABEL: self.key[1]} if sidecar else selector_labels(self.key[1])
        return ",".join(f"{label}={value}" for label, value in labels.items())

    def is_behind(self, version: int) -> bool:
        """Return whether a relay that answered still runs an earlier version of the configuration."""
        reports = (answer.report for answer in self.running_answers)
        return any(report is not None and (report.config.version or 0) < version for report in reports)


def _work(relay: OutboxRelay, subscription: EventSubscription) -> Work:
    metadata, needed = subscription.metadata, (*database_secrets(relay), *sink_secrets(subscription))
    return Work(f"{metadata.namespace}/{metadata.name}", subscription.spec.partitions, frozenset(needed))
