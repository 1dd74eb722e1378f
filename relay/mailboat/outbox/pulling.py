"""The policy of a pull subscription, which `mailboat.pull` reads from the database.

The row holds all settings of the manifest, so that consumers in any language need only a database connection.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from psycopg import AsyncCursor

from mailboat.outbox.layout import Layout
from mailboat.outbox.link import Row
from mailboat.outbox.sqlfiles import statements
from mailboat_spec import EventSubscriptionSpec, OnExhausted, Ordering, Pattern

_SQL = statements("pulling")


def policy(number: int, spec: EventSubscriptionSpec, layout: Layout) -> dict[str, Any]:
    """Return the row of ``mailboat.pull_policies``."""
    delivery, tags = spec.delivery, spec.filter.tags
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
        "blocks": delivery.on_exhausted is OnExhausted.BLOCK,
        "no_handler": delivery.no_handler.value,
    }


async def declare_policy(cursor: AsyncCursor[Row], number: int, spec: EventSubscriptionSpec, layout: Layout) -> None:
    """Store the policy, or delete it if the subscription is no longer pulled. Runs in the caller's transaction."""
    if spec.sink.pull is None:
        await cursor.execute(_SQL["withdraw"], {"subscription_id": number})
        return
    await cursor.execute(_SQL["declare"], policy(number, spec, layout))
    await cursor.execute(_SQL["make_journals"], {"subscription_id": number})


def _likes(patterns: Sequence[Pattern]) -> list[str] | None:
    """Return the LIKE patterns; None if every value matches."""
    if not patterns or any(str(pattern) == "*" for pattern in patterns):
        return None
    return [pattern.like() for pattern in patterns]
