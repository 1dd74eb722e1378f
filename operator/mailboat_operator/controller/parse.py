"""Parse API objects into models, or into a message with the reason why not.

The CRD schemas reject most errors; this module reports those that only the models detect. It also finds the last valid
form of a subscription whose spec became invalid. Parsing thousands of subscriptions takes seconds:
``SubscriptionParser`` parses each resource version once, and is called in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mailboat_operator.kube.client import Object
from mailboat_operator.relays.reports import Answer
from mailboat_operator.resources.configmap import (
    Configuration,
    Item,
    is_named,
    item,
    knows_by_name,
    last_valid_form,
)
from mailboat_operator.resources.pod import has_source
from mailboat_spec import EventSubscription, OutboxRelay, SpecError, Tracking, read_documents


@dataclass(frozen=True, slots=True)
class ParsedRelay:
    """A relay, or the problem with its spec."""

    relay: OutboxRelay | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ParsedSubscription:
    """A subscription, or the problem with its spec."""

    found: Object
    subscription: EventSubscription | None
    problem: str = ""
    item: Item | None = None
    """The subscription as an item of the relay's configuration."""


@dataclass(frozen=True, slots=True)
class LastValidForm:
    """The form that relays have of a subscription whose spec became invalid."""

    form: Object | None
    """The last valid form, as written; None if there is none."""
    lost: bool = False
    """Relays have the subscription, but its last valid form can't be recovered."""


def find_last_valid_form(
    found: Object, relay: str, written: Configuration | None, told: Configuration | None, answers: Sequence[Answer]
) -> LastValidForm:
    """Find the last valid form in the ConfigMap (``written``), else in the last pushed configuration (``told``).

    Others can delete or corrupt a ConfigMap. If this process has not pushed a configuration yet, check whether relay
    reports contain the subscription. Reports of an earlier version are ignored: such a relay may not have received its
    removal yet.
    """
    metadata = found["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    for each in (written, told):
        form = last_valid_form(each, metadata["uid"])
        if form is not None and is_named(form, namespace, name):
            return LastValidForm(form)
    if told is not None or knows_by_name(written, namespace, name):  # left out by the operator, or a predecessor's
        return LastValidForm(None)
    if written is None and (found.get("status") or {}).get("partitions"):
        return LastValidForm(None, lost=True)
    reports = [answer.report for answer in answers if answer.report is not None]
    return LastValidForm(
        None,
        lost=any(
            (known := report.relay(relay)) is not None
            and known.subscription(f"{namespace}/{name}") is not None
            and (report.config.version or 0) >= (written.version if written is not None else 0)
            for report in reports
        ),
    )


def parse_relay(found: Object) -> ParsedRelay:
    try:
        return ParsedRelay(read_documents([(_label(found), _without_status(found))]).relays[0])
    except SpecError as error:
        return ParsedRelay(None, _problem(error))


class SubscriptionParser:
    """Parser for the subscriptions of one relay, with a cache."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[object, ParsedSubscription]] = {}
        """By uid: the result, with everything that it depends on."""

    def read(self, relay: Object, found: Sequence[Object]) -> list[ParsedSubscription]:
        """Parse each subscription with its relay and, if the relay serves only one, with the first valid one."""
        serves_one = _serves_one(relay)
        read: dict[str, tuple[object, ParsedSubscription]] = {}
        first: Object | None = None
        for each in found:
            metadata = each["metadata"]
            beside = first["metadata"]["uid"] if first is not None else ""
            mark = (metadata["resourceVersion"], _mark(relay), beside)
            known = self._read.get(metadata["uid"])
            result = known[1] if known is not None and known[0] == mark else _read_subscription(relay, first, each)
            read[metadata["uid"]] = (mark, result)
            if serves_one and first is None and result.subscription is not None:
                first = each
        self._read = read
        return [result for _, result in read.values()]


def _serves_one(relay: Object) -> bool:
    spec = relay.get("spec")
    outbox = spec.get("outbox") if isinstance(spec, Mapping) else None
    return isinstance(outbox, Mapping) and outbox.get("tracking") == Tracking.ROWS


def _mark(relay: Object) -> tuple[str, int]:
    return relay["metadata"]["uid"], relay["metadata"].get("generation", 0)


def parse_subscription_alone(found: Object) -> EventSubscription | None:
    """Parse a subscription without its real relay: a last valid form, or one whose relay does not exist."""
    if has_source(found):
        return parse_consumer(found).subscription
    try:
        relay = {
            "apiVersion": found["apiVersion"],
            "kind": "OutboxRelay",
            "metadata": {"name": found["spec"]["relayRef"]["name"], "namespace": found["metadata"]["namespace"]},
            "spec": {"database": {"url": "postgresql://unknown"}},
        }
        return read_documents([("relay", relay), (_label(found), _without_status(found))]).subscriptions[0]
    except (SpecError, KeyError, TypeError):
        return None


def parse_consumer(found: Object) -> ParsedSubscription:
    """Parse a subscription with a source."""
    try:
        return ParsedSubscription(found, read_documents([(_label(found), _without_status(found))]).subscriptions[0])
    except SpecError as error:
        return ParsedSubscription(found, None, _problem(error))


def _read_subscription(relay: Object, first: Object | None, found: Object) -> ParsedSubscription:
    beside = [relay] if first is None else [relay, first]
    documents = [(_label(each), _without_status(each)) for each in (*beside, found)]
    try:
        subscription = read_documents(documents).subscriptions[-1]
        return ParsedSubscription(found, subscription, item=item(subscription))
    except SpecError as error:
        own = [problem for problem in error.problems if problem.source == _label(found)]
        if not own:  # a problem of the relay, reported there
            alone = parse_subscription_alone(found)
            return ParsedSubscription(found, alone, item=item(alone) if alone is not None else None)
        return ParsedSubscription(found, None, _problem(SpecError(tuple(own))))


def _problem(error: SpecError) -> str:
    """Format problems as field and remedy. The message appears on the resource itself, so its name is omitted."""
    return "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in error.problems)


def _label(found: Object) -> str:
    return f"{found['kind']} {found['metadata']['name']}"


def _without_status(found: Object) -> Object:
    return {name: value for name, value in found.items() if name != "status"}
