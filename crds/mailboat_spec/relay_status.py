"""Answer of a relay's ``GET /status``: written by the relay, read by the operator and ``mailboat status``.

Frozen dataclasses: the writer builds thousands of them without validation, and ``read_process_status`` validates on the
other side. The wire format is JSON with camelCase names and seconds as numbers. The reader may be older or newer than
the writer, so unknown fields are ignored and every field but the name has a default. No value is secret.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

WIRE: Final = ConfigDict(
    alias_generator=to_camel,
    validate_by_name=True,
    validate_by_alias=True,
    extra="ignore",
    hide_input_in_errors=True,
    allow_inf_nan=False,
)
Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(le=1e12)]


class _Wire:
    """Base that gives the dataclasses their wire format."""

    __slots__ = ()
    __pydantic_config__: ClassVar = WIRE


@dataclass(frozen=True, slots=True)
class PartitionStatus(_Wire):
    """One partition that the reporting relay owns, or counts because its owner is silent."""

    partition: Count
    lag: Count = 0
    lag_bounded: bool = False
    """Counting stopped at the bound, so ``lag`` is a lower bound."""
    oldest_age: Seconds | None = None
    parked: Count = 0
    published: Count = 0
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionStatus(_Wire):
    """One subscription, limited to the partitions that the reporting relay owns or counts."""

    name: str
    """namespace/name of the resource."""
    sink: str = ""
    state: str = "Running"
    """Running or Paused; Failed if the relay could not build the subscription (reason in ``last_error``)."""
    partitions: Count = 0
    """Number of partitions of the whole subscription; ``owned`` lists the relay's."""
    lag: Count = 0
    lag_bounded: bool = False
    oldest_age: Seconds | None = None
    parked: Count = 0
    dead: Count = 0
    """Dead letters of the whole subscription that are not replayed yet."""
    published: Count = 0
    """Count since the process started, as is ``refused``."""
    refused: Count = 0
    rate: Seconds = 0.0
    """Events per second, over the last seconds."""
    sink_reachable: bool | None = True
    """None until the destination answered, or an attempt to reach it failed, for the first time."""
    last_error: str | None = None
    """The last failure that no success has followed yet, or of an event that is still parked."""
    last_error_age: Seconds | None = None
    """Seconds since ``last_error`` happened; 0 while it lasts; None without an error."""
    reason: str = ""
    """If Failed, a machine-readable ``mailboat_spec.Reason``; else empty."""
    blocked: Count = 0
    """Events without attempts left, which block their keys (``onExhausted: Block``)."""
    owned: tuple[PartitionStatus, ...] = ()
    orphans: tuple[PartitionStatus, ...] = ()
    """Partitions whose owner is silent or missing, counted by the relay and included in ``lag`` and ``parked``."""
    owners: dict[int, str | None] = field(default_factory=dict)
    """Partition -> relay, as last read from the store."""


@dataclass(frozen=True)
class RelayStatus(_Wire):
    """One OutboxRelay in one process."""

    name: str
    """namespace/name of the resource."""
    relay: str = ""
    """Id of the relay: namespace/pod in a cluster."""
    state: str = ""
    """Connecting, Running, Failed or Stopping."""
    message: str = ""
    """Reason why the relay does not run, and the remedy. While it runs, the error of the outbox maintenance, if any."""
    reason: str = ""
    """Machine-readable ``mailboat_spec.Reason`` why the relay does not run; empty while it runs."""
    database_reachable: bool = False
    schema_ready: bool = False
    outbox: str = ""
    database: str = ""
    """Name of the database and identifier of its system, while connected; else empty."""
    missing_roles: str = ""
    """SQL for an administrator if group roles are missing that the relay's user may not create; else empty."""
    partitions_ahead_days: Seconds | None = None
    """Days for which the outbox has time partitions ahead; below 7 needs attention."""
    retention_blocked: str | None = None
    oldest_snapshot_age: Seconds | None = None
    """Age of the oldest snapshot in the database: Postgres keeps former versions of rows as long."""
    old_snapshot: str = ""
    """Holder of a snapshot that is older than 15 minutes, and the remedy; else empty."""
    peers: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    """Peers that hang or are cut off: their heartbeats are missing, and their leases still run."""
    subscriptions: tuple[SubscriptionStatus, ...] = ()
    stalled: bool = False
    """The relay's loop makes no progress: the only reason for /livez to fail."""
    was_connected: bool = False
    """The relay was connected at least once, which is what /readyz reports."""

    def subscription(self, name: str) -> SubscriptionStatus | None:
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> Mapping[str, SubscriptionStatus]:
        return {each.name: each for each in reversed(self.subscriptions)}


@dataclass(frozen=True, slots=True)
class ConfigReport(_Wire):
    """Configuration of the process: the version in use, and why the last offered one was refused."""

    version: Count | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ProcessStatus(_Wire):
    """The whole answer."""

    relays: tuple[RelayStatus, ...] = ()
    config: ConfigReport = field(default_factory=ConfigReport)
    secrets: dict[str, str] = field(default_factory=dict)
    """Version in use, by Secret."""

    def relay(self, name: str) -> RelayStatus | None:
        return next((each for each in self.relays if each.name == name), None)


_READER: Final = TypeAdapter(ProcessStatus)


def read_process_status(content: bytes) -> ProcessStatus | None:
    """Parse an answer; None if it is not the status of a relay."""
    try:
        return _READER.validate_json(content)
    except (ValidationError, RecursionError):
        return None


def as_json(value: Any) -> Any:
    """Convert a status to JSON-ready values. Fields with ``wire: False`` in their metadata are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        sent = (each for each in fields(value) if each.metadata.get("wire", True))
        return {to_camel(each.name): as_json(getattr(value, each.name)) for each in sent}
    if isinstance(value, tuple | list):
        return [as_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    return value
