"""What a relay says about itself: values for ``/status``, the metrics, the CLI and the operator.

Plain frozen dataclasses; ``as_json`` is the wire format (camelCase, seconds as numbers). Nothing in here is secret.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any


class RelayState(StrEnum):
    """Where a relay is in its life."""

    CONNECTING = "Connecting"
    RUNNING = "Running"
    FAILED = "Failed"
    """It needs a person: the message says what to do. It goes on trying."""
    STOPPING = "Stopping"


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition that this relay owns."""

    partition: int
    lag: int
    lag_bounded: bool
    """There are at least that many; counting stopped there."""
    oldest_age: float | None
    parked: int
    published: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """One subscription, as far as this relay moves it."""

    name: str
    sink: str
    state: str
    """Running or Paused; Failed where this relay could not even begin, for the reason in ``last_error``."""
    partitions: int
    """Of the subscription as a whole; ``owned`` lists this relay's."""
    lag: int
    lag_bounded: bool
    oldest_age: float | None
    parked: int
    dead: int
    """Of the whole subscription, not replayed yet."""
    published: int
    """Since this process started, as are ``refused``."""
    refused: int
    rate: float
    """Events per second, over the last seconds."""
    sink_reachable: bool
    last_error: str | None
    reason: str
    """Failed only: one word for programs, of ``mailboat_spec.Reason``."""
    blocked: int
    """Keys that stand still behind an event that used up its attempts (``onExhausted: Block``)."""
    owned: tuple[PartitionStatus, ...]
    owners: dict[int, str | None]
    """Partition -> relay, as last seen in the store."""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """One OutboxRelay in one process."""

    name: str
    """namespace/name of the resource."""
    relay: str
    """The id of this relay."""
    state: RelayState
    message: str
    """What keeps it from running, and what to do; while it runs, why the upkeep of its outbox failed, if it did."""
    reason: str
    """Why it does not run, in one word for programs, of ``mailboat_spec.Reason``; empty while it does."""
    database_reachable: bool
    schema_ready: bool
    outbox: str
    partitions_ahead_days: float | None
    """How far ahead the outbox has time partitions; below 7 somebody should look."""
    retention_blocked: str | None
    peers: tuple[str, ...]
    subscriptions: tuple[SubscriptionStatus, ...]
    stalled: bool
    """The relay's own loop stands still: the only reason for /livez to fail."""


def as_json(value: Any) -> Any:
    """A status as JSON-ready values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {_camel(field.name): as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
