"""Observation: everything that one reconcile decides on, read once and parsed. The decisions on it are pure.

The CRD schemas reject most errors; parsing reports those that only the models detect. If the spec of a subscription
became invalid, relays keep its last valid form. Parsing thousands of subscriptions takes seconds:
``SubscriptionParser`` parses each resource version once, and is called in a thread.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from mailboat_operator.kube.client import Key, Object
from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, config_version, relay_reports
from mailboat_operator.relays.state import Work
from mailboat_operator.resources import configmap, selector_labels
from mailboat_operator.resources.configmap import Configuration, contains_name, is_named, last_valid_form
from mailboat_operator.resources.pod import child_name, database_secrets, secrets_in, sink_secrets
from mailboat_spec import EventSubscription, OutboxRelay, Runtime, SpecError, full_name
from mailboat_spec.documents import read_document
from mailboat_spec.names import RELAY_LABEL
from mailboat_spec.relay_status import RelayStatus

Model = TypeVar("Model", OutboxRelay, EventSubscription)


@dataclass(frozen=True)
class ObservedSubscription:
    """One subscription: its resource, and the form that relays are configured with."""

    found: Object
    subscription: EventSubscription | None
    """The spec, or its last valid form. None if that form can't be parsed, or if relays have none."""
    problem: str = ""
    """Why the spec is invalid; empty if it is valid."""
    last_valid: Object | None = None
    """The last valid form, as relays have it, if the spec is invalid."""
    lost: bool = False
    """Relays have the subscription, but its last valid form can't be recovered."""

    @cached_property
    def item(self) -> configmap.Item | None:
        """The subscription in the configuration of the relays; None if they get none."""
        if self.last_valid is not None:
            return configmap.raw_item(self.last_valid)
        return configmap.item(self.subscription) if self.subscription is not None else None


@dataclass(frozen=True)
class Observation:
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
    answers: Sequence[Answer]
    """One for each pod that contains a relay and has not finished."""

    @property
    def name(self) -> str:
        return "/".join(self.key)

    @property
    def items(self) -> list[configmap.Item]:
        return [each.item for each in self.subscriptions if each.item is not None]

    @property
    def version_in_use(self) -> int:
        """Highest version of a configuration that relays report."""
        return max(map(config_version, self.answers), default=0)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of all Secrets that relays must mount, including those of subscriptions that only relays can parse."""
        if self.relay is None:
            return ()
        forms = [each.last_valid if each.problem else each.found for each in self.subscriptions]
        of_sinks = {name for form in forms if form is not None for name in secrets_in(form)}
        return tuple(sorted({*database_secrets(self.relay), *of_sinks}))

    @property
    def work(self) -> list[Work]:
        """Subscriptions to assign. Partitions of pull subscriptions belong to consumers."""
        if self.relay is None:
            return []
        found = [each.subscription for each in self.subscriptions if each.subscription is not None]
        of_relay = database_secrets(self.relay)
        return [
            Work(full_name(each), each.spec.partitions, frozenset((*of_relay, *sink_secrets(each))))
            for each in found
            if each.spec.sink.pull is None
        ]

    def lacking(self, secrets: Collection[str]) -> list[RelayPod]:
        """Return the running pods that do not mount one of these Secrets."""
        return [pod for pod in self.pods if pod.alive and not all(pod.mounts(each) for each in secrets)]

    @property
    def running_answers(self) -> list[Answer]:
        """Answers of pods that keep running. A stopping relay hands over its partitions: its report is outdated."""
        return [answer for answer in self.answers if answer.pod.alive]

    @cached_property
    def reports(self) -> list[RelayStatus]:
        """Reports of relays that keep running."""
        return [report for _, report in relay_reports(self.running_answers, self.name)]

    @property
    def hold_reason(self) -> str:
        """Why relays get no new configuration; empty if they do."""
        lost = ", ".join(each.found["metadata"]["name"] for each in self.subscriptions if each.lost)
        return lost and (
            f"Relays get no new configuration: the spec of EventSubscription {lost} is invalid, and the ConfigMap "
            f'"{child_name(self.key[1])}" does not have its last valid form any more. Without it relays would forget '
            "how far it has come. Correct that spec, or delete the EventSubscription."
        )

    @property
    def sidecar_works(self) -> bool:
        """Return whether the Deployment can be deleted after a change of the runtime to Sidecar.

        Application pods get their sidecar only when they are restarted. Until a sidecar works, deleting the Deployment
        would stop delivery.
        """
        reports = relay_reports(self.running_answers, self.name)
        return any(not answer.pod.own and report.database_reachable for answer, report in reports)

    @property
    def selector(self) -> str:
        """Label selector of the relay's pods, for the scale subresource."""
        sidecar = self.relay is not None and self.relay.spec.runtime is Runtime.SIDECAR
        labels = {RELAY_LABEL: self.key[1]} if sidecar else selector_labels(self.key[1])
        return ",".join(f"{label}={value}" for label, value in labels.items())

    def is_behind(self, version: int) -> bool:
        """Return whether a relay that answered still runs an earlier version of the configuration."""
        return any(answer.report is not None and config_version(answer) < version for answer in self.running_answers)


def find_last_valid_form(
    found: Object, relay: str, written: Configuration | None, pushed: Configuration | None, answers: Sequence[Answer]
) -> tuple[Object | None, bool]:
    """Find the last valid form in the ConfigMap (``written``), else in the last pushed configuration (``pushed``).

    Return the form, as written, and whether it is lost: relays have the subscription, but no form can be found.

    Others can delete or corrupt a ConfigMap. If this process has not pushed a configuration yet, check whether relay
    reports contain the subscription. Reports of an earlier version are ignored: such a relay may not have received its
    removal yet.
    """
    metadata = found["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    for each in (written, pushed):
        form = last_valid_form(each, metadata["uid"])
        if form is not None and is_named(form, namespace, name):
            return form, False
    if pushed is not None or contains_name(written, namespace, name):  # left out by the operator, or a predecessor's
        return None, False
    if written is None and (found.get("status") or {}).get("partitions"):
        return None, True
    least = written.version if written is not None else 0
    return None, any(
        report.subscription(f"{namespace}/{name}") is not None and config_version(answer) >= least
        for answer, report in relay_reports(answers, relay)
    )


def parse_subscription(found: Object) -> ObservedSubscription:
    """Parse a subscription by itself, whatever it reads."""
    return ObservedSubscription(found, *parse_resource(found, EventSubscription))


class SubscriptionParser:
    """Parser for the subscriptions of one relay, with a cache."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, str], ObservedSubscription] = {}
        """By uid and resource version."""

    def read(self, found: Sequence[Object]) -> list[ObservedSubscription]:
        read = {}
        for each in found:
            version = (each["metadata"]["uid"], each["metadata"]["resourceVersion"])
            read[version] = self._cache.get(version) or parse_subscription(each)
        self._cache = read
        return list(read.values())


def parse_resource(found: Object, model: type[Model]) -> tuple[Model | None, str]:
    """Return the resource, or None and its problems: field and remedy, without the name of the resource itself."""
    try:
        resource = read_document("", {name: value for name, value in found.items() if name != "status"})
    except SpecError as error:
        lines = (f"{each.path}: {each.message}" if each.path else each.message for each in error.problems)
        return None, "; ".join(lines)
    assert isinstance(resource, model)
    return resource, ""
