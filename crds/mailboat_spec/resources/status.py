"""Status of each kind, written by the operator.

A status is parsed leniently: the output of ``kubectl get -o yaml`` contains a status, perhaps of a newer version, which
must not keep a relay from starting.
"""

from __future__ import annotations

from pydantic import Field

from mailboat_spec.base import StatusModel
from mailboat_spec.cel_rules import keyed_by
from mailboat_spec.conditions import Condition
from mailboat_spec.durations import Duration
from mailboat_spec.timestamps import Timestamp


class ResourceStatus(StatusModel):
    """Status fields of both kinds."""

    observed_generation: int = Field(
        default=0, description="Generation of the resource that this status describes. Default: 0, nothing seen yet."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="Conditions, at most one of each type. Default: none.",
        json_schema_extra=keyed_by("type"),
    )

    def condition(self, type_: str) -> Condition | None:
        """Return the condition of this type, or None."""
        return next((condition for condition in self.conditions if condition.type == type_), None)


class OutboxRelayStatus(ResourceStatus):
    """Status of a relay."""

    replicas: int = Field(default=0, description="Relay pods that exist. Default: 0.")
    ready_replicas: int = Field(default=0, description="Relay pods that are ready. Default: 0.")
    replicas_display: str = Field(
        default="",
        description='Relays that are ready out of those that are wanted, as kubectl prints it: "1/2". Default: empty.',
    )
    selector: str = Field(
        default="", description="Label selector of the relay pods, for the scale subresource. Default: empty."
    )
    subscriptions: int = Field(default=0, description="Subscriptions that refer to this relay. Default: 0.")
    database: str = Field(
        default="",
        description="Database that the relays use, with the identifier of its system. Default: empty, none yet.",
    )


class Assignment(StatusModel):
    """Who moves one partition of a subscription, and how far behind it is."""

    partition: int = Field(description="Number of the partition, from 0.")
    pod: str = Field(default="", description="Pod (outside Kubernetes: relay) that holds it. Default: empty, nobody.")
    lag: int = Field(default=0, description="Matching events of this partition not yet settled. Default: 0.")
    oldest_age: Duration | None = Field(
        default=None, description="Age of the oldest of them, as a duration. Default: none."
    )


class EventSubscriptionStatus(ResourceStatus):
    """Status of a subscription."""

    source: str = Field(
        default="", description="Kind and name of what is read, for example outbox/orders. Default: empty."
    )
    sink: str = Field(default="", description="Kind of the sink, for example kafka. Default: empty.")
    partition_count: int = Field(
        default=0, description="Partitions of the subscription, or of the topic that it reads. Default: 0."
    )
    lag: int = Field(
        default=0, description="Matching events not yet settled; counted up to a bound, never beyond. Default: 0."
    )
    lag_display: str = Field(
        default="",
        description='The same as kubectl prints it: "100000+" where counting stopped or a relay hangs, "unknown" while'
        " no relay reports. Default: empty.",
    )
    oldest_age: Duration | None = Field(
        default=None, description="Age of the oldest event not yet settled, as a duration. Default: none."
    )
    parked: int = Field(default=0, description="Events that wait for their next attempt or behind one. Default: 0.")
    dead: int = Field(default=0, description="Dead letters not yet replayed. Default: 0.")
    rate: float = Field(default=0.0, description="Events published per second, over the last ten seconds. Default: 0.")
    last_error: str = Field(default="", description="The last failure, shortened, without payload. Default: empty.")
    last_error_time: Timestamp | None = Field(
        default=None, description="When it happened, or began while it lasts, RFC 3339. Default: none."
    )
    partitions: tuple[Assignment, ...] = Field(
        default=(), description="Who holds which partition. Default: none.", json_schema_extra=keyed_by("partition")
    )
