"""Status of each kind, written by the operator.

A status is parsed leniently: the output of ``kubectl get -o yaml`` contains a status, perhaps of a newer version, which
must not keep a relay from starting.
"""

from __future__ import annotations

from pydantic import Field

from mailboat_spec.base import StatusModel
from mailboat_spec.conditions import Condition
from mailboat_spec.rules import keyed_by
from mailboat_spec.scalars import Duration, Timestamp


class ResourceStatus(StatusModel):
    """Status fields of both kinds."""

    observed_generation: int = 0
    """Generation of the resource that this status describes. Default: 0, nothing seen yet."""
    conditions: tuple[Condition, ...] = Field(default=(), json_schema_extra=keyed_by("type"))
    """Conditions, at most one of each type. Default: none."""

    def condition(self, type_: str) -> Condition | None:
        """Return the condition of this type, or None."""
        return next((condition for condition in self.conditions if condition.type == type_), None)


class OutboxRelayStatus(ResourceStatus):
    """Status of a relay."""

    replicas: int = 0
    """Relay pods that exist. Default: 0."""
    ready_replicas: int = 0
    """Relay pods that are ready. Default: 0."""
    replicas_display: str = ""
    """Relays that are ready out of those that are wanted, as kubectl prints it: "1/2". Default: empty."""
    selector: str = ""
    """Label selector of the relay pods, for the scale subresource. Default: empty."""
    subscriptions: int = 0
    """Subscriptions that refer to this relay. Default: 0."""
    database: str = ""
    """Database that the relays use, with the identifier of its system. Default: empty, none yet."""


class Assignment(StatusModel):
    """Who moves one partition of a subscription, and how far behind it is."""

    partition: int
    """Number of the partition, from 0."""
    pod: str = ""
    """Pod (outside Kubernetes: relay) that holds it. Default: empty, nobody."""
    lag: int = 0
    """Matching events of this partition not yet settled. Default: 0."""
    oldest_age: Duration | None = None
    """Age of the oldest of them, as a duration. Default: none."""


class EventSubscriptionStatus(ResourceStatus):
    """Status of a subscription."""

    source: str = ""
    """Kind and name of what is read, for example outbox/orders. Default: empty."""
    sink: str = ""
    """Kind of the sink, for example kafka. Default: empty."""
    partition_count: int = 0
    """Partitions of the subscription, or of the topic that it reads. Default: 0."""
    lag: int = 0
    """Matching events not yet settled; counted up to a bound, never beyond. Default: 0."""
    lag_display: str = ""
    """The same as kubectl prints it: "100000+" where counting stopped or a relay hangs, "unknown" while no relay
    reports. Default: empty."""
    oldest_age: Duration | None = None
    """Age of the oldest event not yet settled, as a duration. Default: none."""
    parked: int = 0
    """Events that wait for their next attempt or behind one. Default: 0."""
    dead: int = 0
    """Dead letters not yet replayed. Default: 0."""
    rate: float = 0.0
    """Events published per second, over the last ten seconds. Default: 0."""
    last_error: str = ""
    """The last failure, shortened, without payload. Default: empty."""
    last_error_time: Timestamp | None = None
    """When it happened, or began while it lasts, RFC 3339. Default: none."""
    partitions: tuple[Assignment, ...] = Field(default=(), json_schema_extra=keyed_by("partition"))
    """Who holds which partition. Default: none."""
