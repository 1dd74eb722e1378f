"""The policy of a pull subscription, which `mailboat.pull` reads from the database.

The row holds all settings of the manifest, so that consumers in any language need only a database connection.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from psycopg import AsyncCursor

from mailboat.errors import ConfigError
from mailboat.store.connection import Row
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscriptionSpec, Filter, OnExhausted, Ordering, Pattern

_SQL = statements("pull_policy")


def effective_filter(name: str, spec: EventSubscriptionSpec) -> Filter:
    """Return the subscription's filter. A pull subscription that emits its dead letters does not receive them."""
    if not _emits_dead(spec):
        return spec.filter
    tags = spec.filter.tags
    none_of = (*tags.none_of, f"dead-letter-of={name}")
    return spec.filter.model_copy(update={"tags": tags.model_copy(update={"none_of": none_of})})


def _emits_dead(spec: EventSubscriptionSpec) -> bool:
    return spec.sink.pull is not None and spec.sink.pull.emit_dead_letters


def policy(number: int, name: str, spec: EventSubscriptionSpec, layout: TableLayout) -> dict[str, Any]:
    """Return the row of ``mailboat.pull_policies``."""
    delivery, tags = spec.delivery, effective_filter(name, spec).tags
    if layout.columns and _emits_dead(spec):
        raise ConfigError(
            f"EventSubscription {name}: spec.sink.pull.emitDeadLetters needs an outbox with Mailboat's own columns, and"
            f" the columns of {layout.table} are mapped. Remove it: dead letters are kept in mailboat.dead_letters."
        )
    return {
        "subscription_id": number,
        "columns": json.dumps(dict(layout.columns)),
        "event_types": _likes(spec.filter.event_types),
        "aggregate_types": _likes(spec.filter.aggregate_types),
        "tags_all": list(tags.all_of) or None,
        "tags_any": list(tags.any_of) or None,
        "tags_none": list(tags.none_of) or None,
        "ordered": spec.ordering is Ordering.KEY,
        "batch_size": spec.batch_size,
        "group_by": list(delivery.group_by),
        "max_group": delivery.max_group,
        "max_attempts": spec.max_attempts,
        "backoff_initial": delivery.backoff.initial.seconds,
        "backoff_factor": delivery.backoff.factor,
        "backoff_max": delivery.backoff.max.seconds,
        "backoff_jitter": delivery.backoff.jitter,
        "block_when_exhausted": delivery.on_exhausted is OnExhausted.BLOCK,
        "emit_dead_letters": _emits_dead(spec),
        "no_handler": delivery.no_handler.value,
    }


async def declare_policy(
    cursor: AsyncCursor[Row], number: int, name: str, spec: EventSubscriptionSpec, layout: TableLayout
) -> None:
    """Store the policy, or delete it if the subscription is no longer pulled. Runs in the caller's transaction."""
    if spec.sink.pull is None:
        await cursor.execute(_SQL["withdraw"], {"subscription_id": number})
        return
    await cursor.execute(_SQL["declare"], policy(number, name, spec, layout))
    await cursor.execute(_SQL["create_functions"], {"subscription_id": number})


def _likes(patterns: Sequence[Pattern]) -> list[str] | None:
    """Return the LIKE patterns; None if every value matches."""
    if not patterns or any(str(pattern) == "*" for pattern in patterns):
        return None
    return [pattern.like() for pattern in patterns]
