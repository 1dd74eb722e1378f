"""Warnings about manifests that are valid but probably not what was meant.

Pure functions. ``mailboat check`` prints the warnings, and a relay logs them once at its start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mailboat_spec import EventSubscription, Manifests, OnExhausted, Pattern, full_name

_PATTERN_PROBLEMS: Final = (
    (re.compile(r"^\s|\s$"), "begins or ends with a space, so it matches no ordinary type"),
    (re.compile(r",\s"), "has a comma in it: write one list entry per pattern"),
    (re.compile(r"^\.[*+]"), "looks like a regular expression and matches only types that begin with a dot: write *"),
    (
        re.compile(r"^\^|\$$|\\|\||\(|\+$|\.\.\*"),
        "looks like a regular expression; patterns know only * (any characters) and ? (one character)",
    ),
    (re.compile(r"%"), "has a %, which stands for itself: write * for any characters"),
)


def warnings(manifests: Manifests) -> list[str]:
    """Return a sentence per probable mistake, with resource and field."""
    found = [each for subscription in manifests.subscriptions for each in subscription_warnings(subscription)]
    served = {(each.metadata.namespace, each.spec.relay) for each in manifests.subscriptions}
    found += [
        f"OutboxRelay {full_name(relay)}: no EventSubscription refers to it, so nothing is delivered from its outbox"
        for relay in manifests.relays
        if (relay.metadata.namespace, relay.metadata.name) not in served
    ]
    return found


def subscription_warnings(subscription: EventSubscription) -> Iterator[str]:
    """Yield the warnings about one subscription."""
    where, spec = f"EventSubscription {full_name(subscription)}", subscription.spec
    for field, patterns in (("eventTypes", spec.filter.event_types), ("aggregateTypes", spec.filter.aggregate_types)):
        for pattern in patterns:
            if (problem := pattern_problem(pattern)) is not None:
                yield f'{where}: spec.filter.{field}: "{pattern}" {problem}'
    if spec.delivery.on_exhausted is OnExhausted.BLOCK and spec.delivery.dead_letter is not None:
        yield f"{where}: spec.delivery.deadLetter has no effect with onExhausted: Block"


def pattern_problem(pattern: Pattern) -> str | None:
    """Return why a pattern probably does not match what was meant, or None."""
    return next((problem for shape, problem in _PATTERN_PROBLEMS if shape.search(str(pattern))), None)
