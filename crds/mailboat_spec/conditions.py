"""What resources say about themselves: condition types, reasons, and Kubernetes' own Condition.

A condition's type is a question (`is the sink reachable?`), its status the answer, its reason the answer for programs
and its message the answer for people, with what to do next. Types and reasons are an interface: alerts and scripts
match them.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from mailboat_spec.base import StatusModel
from mailboat_spec.timestamps import Timestamp


class ConditionStatus(StrEnum):
    """The answer."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    """The questions."""

    READY = "Ready"
    """All that the spec asks for is there and events flow. False or Unknown: the reason says what is missing."""
    RECONCILING = "Reconciling"
    """kstatus: True while the operator is still bringing the cluster to what the spec says. Absent when done."""
    STALLED = "Stalled"
    """kstatus: True when no progress is to be expected until a person changes something. Absent when all is well."""
    DATABASE_REACHABLE = "DatabaseReachable"
    """At least one relay has a working session on the primary of the outbox's database."""
    SCHEMA_READY = "SchemaReady"
    """The outbox and Mailboat's own tables are as this version needs them, partitions ahead of time included."""
    SINK_REACHABLE = "SinkReachable"
    """The last batch was answered by the destination, whatever the answer was."""
    ASSIGNED = "Assigned"
    """Every partition is held by a live relay."""
    PAUSED = "Paused"
    """True while nothing is delivered because somebody, or the destination (HTTP 410), wants it so."""
    RETENTION_BLOCKED = "RetentionBlocked"
    """True while old events are kept only because a subscription has not delivered them yet; the message names it."""
    KEYS_BLOCKED = "KeysBlocked"
    """True while keys stand still because an event used up its attempts and ``onExhausted`` is ``Block``."""
    SIDECARS_INJECTED = "SidecarsInjected"
    """Sidecar only. False when pods that ask for a sidecar run without one; the message names them."""
    SECRETS_MOUNTED = "SecretsMounted"
    """False when running pods lack a Secret that the spec refers to and need a restart; the message names them."""


class Reason(StrEnum):
    """The answers, for programs."""

    DELIVERING = "Delivering"
    """Ready: every partition is held, the destination answers."""
    AVAILABLE = "Available"
    """Ready (relay): enough relays run and reach the database."""
    REACHABLE = "Reachable"
    """The database or the destination answers."""
    UP_TO_DATE = "UpToDate"
    """The schema is the one that this version needs; the pods are the ones that the template describes."""
    ALL_ASSIGNED = "AllAssigned"
    """Every partition has a live owner."""
    RUNNING = "Running"
    """Not paused."""
    NOTHING_BLOCKED = "NothingBlocked"
    """No key stands still; old events are removed in time."""

    INVALID_SPEC = "InvalidSpec"
    """The spec can't be used; nothing was changed in the cluster. The message names the field."""
    RELAY_NOT_FOUND = "RelayNotFound"
    """``relayRef`` names no OutboxRelay in the namespace."""
    NAME_TAKEN = "NameTaken"
    """An object that is not Mailboat's has the name of a child: rename the resource or remove that object."""
    CONFIGURATION_HELD = "ConfigurationHeld"
    """Relays get no new configuration, since it would make them forget a subscription whose spec is invalid."""
    SECRET_NOT_FOUND = "SecretNotFound"
    """A Secret, or a key of one, that the spec refers to is not there."""
    SINK_NOT_SUPPORTED = "SinkNotSupported"
    """The relay's version has no such sink, or its package is not installed."""

    PROGRESSING = "Progressing"
    """The operator is at it: pods roll out, partitions move."""
    STARTING = "Starting"
    """No relay has reported yet."""
    NOT_ENOUGH_RELAYS = "NotEnoughRelays"
    """Fewer relays are ready than the spec asks for."""
    PARTITIONS_WITHOUT_OWNER = "PartitionsWithoutOwner"
    """Some partitions are held by nobody."""

    FORBIDDEN = "Forbidden"
    """The API server does not let the operator do its work: a quota, a policy, a missing right. The message says which;
    it is tried again."""

    DATABASE_UNREACHABLE = "DatabaseUnreachable"
    """No session on the database: the network, the password or the server itself."""
    DATABASE_IN_RECOVERY = "DatabaseInRecovery"
    """The server is a standby: relays need the primary."""
    FOREIGN_DATABASE = "ForeignDatabase"
    """The cursors are of another database system (a restored dump): ``mailboat rebase`` continues on request."""
    SCHEMA_MISMATCH = "SchemaMismatch"
    """Tables, columns or rights are missing; the message has the SQL, or ``mailboat migrate`` mends it."""
    PARTITIONS_RUN_OUT = "PartitionsRunOut"
    """Less than seven days of time partitions lie ahead: writes would fail once they are used up."""

    SINK_UNAVAILABLE = "SinkUnavailable"
    """The destination is away or refuses everybody. No attempt is counted; delivery resumes by itself."""
    ATTEMPTS_EXHAUSTED = "AttemptsExhausted"
    """Events used up their attempts: dead letters, or blocked keys."""
    PAUSED_BY_SPEC = "PausedBySpec"
    """``state: Paused``."""
    PAUSED_BY_COMMAND = "PausedByCommand"
    """``mailboat pause``, or an update of ``mailboat.subscriptions``."""
    UNDELIVERED_EVENTS = "UndeliveredEvents"
    """Retention waits for a subscription that has not delivered old events."""
    SIDECAR_MISSING = "SidecarMissing"
    """Pods were created while the webhook was away, or could not be given one: restart them."""
    RESTART_NEEDED = "RestartNeeded"
    """Running pods can't get what changed (a new volume): restart them."""


class Condition(StatusModel):
    """metav1.Condition."""

    type: str = Field(description="The question, for example Ready.")
    status: ConditionStatus = Field(description="The answer: True, False or Unknown.")
    reason: str = Field(default="", description="The answer for programs: one word in CamelCase. Default: empty.")
    message: str = Field(default="", description="The answer for people, and what to do next. Default: empty.")
    last_transition_time: Timestamp | None = Field(
        default=None, description="When status changed last, RFC 3339. Default: none."
    )
    observed_generation: int = Field(
        default=0, description="Generation of the resource that this was said about. Default: 0."
    )
