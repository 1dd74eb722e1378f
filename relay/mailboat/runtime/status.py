"""Status of a relay: values for ``/status``, the metrics, the CLI and the operator.

Plain frozen dataclasses; ``as_json`` returns the wire format (camelCase, seconds as numbers). No value is secret.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final

from mailboat.outbox.coverage import Coverage
from mailboat.pump.meters import Meters

_NOT_ON_THE_WIRE: Final = {"wire": False}


class RelayState(StrEnum):
    """Life-cycle state of a relay."""

    CONNECTING = "Connecting"
    RUNNING = "Running"
    FAILED = "Failed"
    """A person has to act as described in the message. The relay keeps retrying."""
    STOPPING = "Stopping"


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition that this relay owns."""

    partition: int
    lag: int
    lag_bounded: bool
    """Counting stopped at the bound, so ``lag`` is a lower bound."""
    oldest_age: float | None
    parked: int
    published: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """One subscription, limited to the partitions that this relay owns or reports."""

    name: str
    sink: str
    state: str
    """Running or Paused; Failed if this relay could not build the subscription (reason in ``last_error``)."""
    partitions: int
    """Number of partitions of the whole subscription; ``owned`` lists this relay's."""
    lag: int
    lag_bounded: bool
    oldest_age: float | None
    parked: int
    dead: int
    """Dead letters of the whole subscription that are not replayed yet."""
    published: int
    """Count since the process started, as is ``refused``."""
    refused: int
    rate: float
    """Events per second, over the last seconds."""
    sink_reachable: bool | None
    """None until the destination answered, or an attempt to reach it failed, for the first time."""
    last_error: str | None
    """The last failure that no success has followed yet, or of an event that is still parked."""
    last_error_age: float | None
    """Seconds since ``last_error`` happened; 0 while it lasts; None without an error."""
    reason: str
    """If Failed, a machine-readable ``mailboat_spec.Reason``; else empty."""
    blocked: int
    """Events without attempts left, which block their keys (``onExhausted: Block``)."""
    owned: tuple[PartitionStatus, ...]
    orphans: tuple[PartitionStatus, ...]
    """Partitions whose owner is silent or missing, counted by this relay and included in ``lag`` and ``parked``."""
    owners: dict[int, str | None]
    """Partition -> relay, as last read from the store."""
    meters: Meters | None = field(default=None, metadata=_NOT_ON_THE_WIRE)
    """Histograms for the metrics."""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """One OutboxRelay in one process."""

    name: str
    """namespace/name of the resource."""
    relay: str
    """The id of this relay."""
    state: RelayState
    message: str
    """Reason why the relay does not run, and the remedy. While it runs, the error of the outbox maintenance, if any."""
    reason: str
    """Machine-readable ``mailboat_spec.Reason`` why the relay does not run; empty while it runs."""
    database_reachable: bool
    schema_ready: bool
    outbox: str
    database: str
    """Name of the database and identifier of its system, while connected; else empty."""
    missing_roles: str
    """SQL for an administrator if group roles are missing that the relay's user may not create; else empty."""
    partitions_ahead_days: float | None
    """Days for which the outbox has time partitions ahead; below 7 needs attention."""
    retention_blocked: str | None
    peers: tuple[str, ...]
    silent: tuple[str, ...]
    """Peers that hang or are cut off: their heartbeats are missing, and their leases still run."""
    subscriptions: tuple[SubscriptionStatus, ...]
    stalled: bool
    """The relay's loop makes no progress: the only reason for /livez to fail."""
    coverage: Coverage = field(default_factory=Coverage)
    """Events that no filter matches, and filters that match no event. The same in all relays of an outbox."""
    was_connected: bool = False
    """The relay was connected at least once, which is what /readyz reports."""


def as_json(value: Any) -> Any:
    """Convert a status to JSON-ready values."""
    if is_dataclass(value) and not isinstance(value, type):
        sent = (each for each in fields(value) if each.metadata.get("wire", True))
        return {_camel(each.name): as_json(getattr(value, each.name)) for each in sent}
    if isinstance(value, tuple | list):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
