"""Parse API objects into models, or into a message with the reason why not.

The CRD schemas reject most errors; this module reports those that only the models detect. It also finds the last valid
form of a subscription whose spec became invalid. Parsing thousands of subscriptions takes seconds:
``SubscriptionParser`` parses each resource version once, and is called in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mailboat_operator.kube.client import Object
from mailboat_operator.relays.reports import Answer
from mailboat_operator.resources.configmap import (
    Configuration,
    Item,
    contains_name,
    is_named,
    item,
    last_valid_form,
)
from mailboat_spec import EventSubscription, OutboxRelay, SpecError
from mailboat_spec.documents import read_document


@dataclass(frozen=True, slots=True)
class ParsedSubscription:
    """A subscription, or the problem with its spec."""

    found: Object
    subscription: EventSubscription | None
    problem: str = ""
    item: Item | None = None
    """The subscription as an item of the relay's configuration."""


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
    reports = [answer.report for answer in answers if answer.report is not None]
    return None, any(
        (status := report.relay(relay)) is not None
        and status.subscription(f"{namespace}/{name}") is not None
        and (report.config.version or 0) >= (written.version if written is not None else 0)
        for report in reports
    )


def parse_relay(found: Object) -> tuple[OutboxRelay | None, str]:
    """Return the relay, or None and the problem with its spec."""
    try:
        relay = read_document("", _without_status(found))
    except SpecError as error:
        return None, _problem(error)
    assert isinstance(relay, OutboxRelay)
    return relay, ""


def parse_subscription(found: Object) -> ParsedSubscription:
    """Parse a subscription by itself, whatever it reads."""
    try:
        subscription = read_document("", _without_status(found))
    except SpecError as error:
        return ParsedSubscription(found, None, _problem(error))
    assert isinstance(subscription, EventSubscription)
    return ParsedSubscription(found, subscription)


class SubscriptionParser:
    """Parser for the subscriptions of one relay, with a cache."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, str], ParsedSubscription] = {}
        """By uid and resource version."""

    def read(self, found: Sequence[Object]) -> list[ParsedSubscription]:
        """Parse each subscription."""
        read = {}
        for each in found:
            version = (each["metadata"]["uid"], each["metadata"]["resourceVersion"])
            read[version] = self._cache.get(version) or _read_subscription(each)
        self._cache = read
        return list(read.values())


def _read_subscription(found: Object) -> ParsedSubscription:
    parsed = parse_subscription(found)
    return parsed if parsed.subscription is None else replace(parsed, item=item(parsed.subscription))


def _problem(error: SpecError) -> str:
    """Format problems as field and remedy. The message appears on the resource itself, so its name is omitted."""
    return "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in error.problems)


def _without_status(found: Object) -> Object:
    return {name: value for name, value in found.items() if name != "status"}
