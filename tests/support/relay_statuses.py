"""Statuses of relays, for tests of their readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from mailboat.runtime.relay_status import RelayState, RelayStatus, SubscriptionStatus
from mailboat_spec.relay_status import PartitionStatus, ProcessStatus


def partition(number: int) -> PartitionStatus:
    return PartitionStatus(
        partition=number, lag=2, lag_bounded=False, oldest_age=1.5, parked=1, published=10, last_error=None
    )


def subscription(**changes: Any) -> SubscriptionStatus:
    plain = SubscriptionStatus(
        name="shop/orders-to-kafka",
        sink="kafka",
        state="Running",
        partitions=4,
        lag=4,
        lag_bounded=False,
        oldest_age=1.5,
        parked=2,
        dead=1,
        published=20,
        refused=3,
        rate=12.5,
        sink_reachable=True,
        last_error=None,
        last_error_age=None,
        reason="",
        blocked=0,
        owned=(partition(0), partition(1)),
        orphans=(),
        owners={0: "a", 1: "a", 2: "b", 3: "b"},
    )
    return replace(plain, **changes)


def relay(**changes: Any) -> RelayStatus:
    plain = RelayStatus(
        name="shop/orders",
        relay="a",
        state=RelayState.RUNNING,
        message="",
        reason="",
        database_reachable=True,
        schema_ready=True,
        outbox="mailboat.outbox",
        database="shop (system 7)",
        missing_roles="",
        partitions_ahead_days=29.5,
        retention_blocked=None,
        peers=("a", "b"),
        silent=(),
        subscriptions=(subscription(),),
        stalled=False,
        was_connected=True,
    )
    return replace(plain, **changes)


def process_status(document: dict[str, Any]) -> ProcessStatus:
    """Return the parsed status of a relay process."""
    return TypeAdapter(ProcessStatus).validate_python(document)
