"""From an object of the API to a model, or to the sentence that says why not.

The CRDs refuse most of what is wrong already; what only the model can see ends here. A subscription that can't be used
any more goes on as relays know it, and it is here that this is looked up. Reading thousands of subscriptions takes
seconds: ``SubscriptionReader`` reads each version of a resource once, and is called in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mailboat_operator.children.config import (
    Configuration,
    Item,
    is_named,
    item,
    knows_by_name,
    last_valid_form,
)
from mailboat_operator.kube import Object
from mailboat_operator.reports import Answer
from mailboat_spec import EventSubscription, OutboxRelay, SpecError, Tracking, read_documents


@dataclass(frozen=True, slots=True)
class ReadRelay:
    """A relay, or what is wrong with it."""

    relay: OutboxRelay | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReadSubscription:
    """A subscription, or what is wrong with it."""

    found: Object
    subscription: EventSubscription | None
    problem: str = ""
    item: Item | None = None
    """The subscription in the relay's configuration."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """What relays know of a subscription whose spec can't be used any more."""

    form: Object | None
    """Its last valid form, as it was written; None: there is none."""
    lost: bool = False
    """Relays know it, and nobody can say any more as what."""


def recalled(
    found: Object, relay: str, written: Configuration | None, told: Configuration | None, answers: Sequence[Answer]
) -> Recalled:
    """By the ConfigMap (``written``), else by what this operator told relays itself.

    A ConfigMap can be deleted or garbled by others. Where nothing is told yet, relays are asked whether they know the
    subscription; one of an earlier version may only not have heard yet that it was left out.
    """
    metadata = found["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    for each in (written, told):
        form = last_valid_form(each, metadata["uid"])
        if form is not None and is_named(form, namespace, name):
            return Recalled(form)
    if told is not None or knows_by_name(written, namespace, name):  # left out by ourselves; of a predecessor
        return Recalled(None)
    if written is None and (found.get("status") or {}).get("assignments"):
        return Recalled(None, lost=True)
    reports = [answer.report for answer in answers if answer.report is not None]
    return Recalled(
        None,
        lost=any(
            (known := report.relay(relay)) is not None
            and known.subscription(f"{namespace}/{name}") is not None
            and (report.config.version or 0) >= (written.version if written is not None else 0)
            for report in reports
        ),
    )


def read_relay(found: Object) -> ReadRelay:
    try:
        return ReadRelay(read_documents([(_label(found), _without_status(found))]).relays[0])
    except SpecError as error:
        return ReadRelay(None, _problem(error))


class SubscriptionReader:
    """Reads the subscriptions of one relay, and remembers what it read."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[object, ReadSubscription]] = {}
        """By uid, with all that the result depends on."""

    def read(self, relay: Object, found: Sequence[Object]) -> list[ReadSubscription]:
        """Each beside its relay and, where the relay serves one only, beside the one that was there first."""
        serves_one = _serves_one(relay)
        read: dict[str, tuple[object, ReadSubscription]] = {}
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


def read_subscription_alone(found: Object) -> EventSubscription | None:
    """One that is known to be right (its last valid form), or has no relay to be compared with."""
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


def _read_subscription(relay: Object, first: Object | None, found: Object) -> ReadSubscription:
    beside = [relay] if first is None else [relay, first]
    documents = [(_label(each), _without_status(each)) for each in (*beside, found)]
    try:
        subscription = read_documents(documents).subscriptions[-1]
        return ReadSubscription(found, subscription, item=item(subscription))
    except SpecError as error:
        own = [problem for problem in error.problems if problem.source == _label(found)]
        if not own:  # the relay's own problem, which is told there
            alone = read_subscription_alone(found)
            return ReadSubscription(found, alone, item=item(alone) if alone is not None else None)
        return ReadSubscription(found, None, _problem(SpecError(tuple(own))))


def _problem(error: SpecError) -> str:
    """Field and remedy; the resource itself is where the sentence is read."""
    return "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in error.problems)


def _label(found: Object) -> str:
    return f"{found['kind']} {found['metadata']['name']}"


def _without_status(found: Object) -> Object:
    return {name: value for name, value in found.items() if name != "status"}
