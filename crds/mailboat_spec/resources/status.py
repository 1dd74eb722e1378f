"""Status of each kind, written by the operator, with its conditions and reasons.

A condition's type is a question (`is the sink reachable?`) and its status the answer. The reason is the answer for
programs, the message the answer for people, with the next step. Types and reasons are an interface: alerts and scripts
match them. A status is parsed leniently: one of a newer version must not keep a relay from starting.
"""

from enum import StrEnum

from pydantic import Field

from mailboat_spec.base import StatusModel
from mailboat_spec.rules import keyed_by
from mailboat_spec.scalars import Duration, Timestamp


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    READY = "Ready"
    """The spec is fulfilled and events flow. If False or Unknown, the reason names the cause."""
    RECONCILING = "Reconciling"
    """kstatus: True while the operator is reconciling the cluster with the spec. Absent when done."""
    STALLED = "Stalled"
    """kstatus: True if no progress is expected without a manual change. Absent otherwise."""
    SOURCE_REACHABLE = "SourceReachable"
    """Source only: consumers reach the broker."""
    IDEMPOTENCY_REACHABLE = "IdempotencyReachable"
    """Source only: consumers reach the store of handled events."""
    IDEMPOTENCY_RELIABLE = "IdempotencyReliable"
    """Source only. False if the store may lose handled events: it evicts keys, lost its memory, or lacks replicas."""
    DEAD_LETTER_REACHABLE = "DeadLetterReachable"
    """Source only: the dead-letter topic accepted the last dead letter."""
    DEAD_LETTERS_STOPPED = "DeadLettersStopped"
    """Source only. True if a consumer stopped because of ``delivery.deadLetter.stopAt``."""
    DATABASE_REACHABLE = "DatabaseReachable"
    """At least one relay has a working session on the primary of the outbox's database."""
    SCHEMA_READY = "SchemaReady"
    """The outbox and Mailboat's tables match this version, and time partitions exist ahead of time."""
    SINK_REACHABLE = "SinkReachable"
    """The destination responded to the last batch, with success or failure."""
    ASSIGNED = "Assigned"
    """Every partition is held by a live relay."""
    PAUSED = "Paused"
    """True while delivery is paused by the spec or by a command."""
    RETENTION_BLOCKED = "RetentionBlocked"
    """True while old events are kept only because a subscription has not delivered them. The message names it."""
    SNAPSHOT_HELD = "SnapshotHeld"
    """True while a snapshot older than 15 minutes keeps old versions of rows. The message names its holder."""
    KEYS_BLOCKED = "KeysBlocked"
    """True while keys are blocked because an event used up its attempts and ``onExhausted`` is ``Block``."""
    SIDECARS_INJECTED = "SidecarsInjected"
    """Sidecar only. False if pods that request a sidecar run without one. The message names them."""
    SECRETS_MOUNTED = "SecretsMounted"
    """False if running pods lack a Secret that the spec refers to and need a restart. The message names them."""


class Reason(StrEnum):
    DELIVERING = "Delivering"
    """Ready: every partition has an owner and the destination responds."""
    CONSUMING = "Consuming"
    """Ready: consumers run in the application's pods and reach what they need."""
    AVAILABLE = "Available"
    """Ready (relay): enough relays run and reach the database."""
    REACHABLE = "Reachable"
    UP_TO_DATE = "UpToDate"
    """The schema matches this version; the pods match the template."""
    ALL_ASSIGNED = "AllAssigned"
    RUNNING = "Running"
    NOTHING_BLOCKED = "NothingBlocked"
    """No key is blocked; old events are removed on time; no old snapshot is held."""

    INVALID_SPEC = "InvalidSpec"
    """The spec is invalid; nothing was changed in the cluster. The message names the field."""
    RELAY_NOT_FOUND = "RelayNotFound"
    NAME_TAKEN = "NameTaken"
    """An object not managed by Mailboat has the name of a child: rename the resource or remove that object."""
    CONFIGURATION_HELD = "ConfigurationHeld"
    """Relays get no new configuration: it would lack a subscription whose spec is invalid."""
    SECRET_NOT_FOUND = "SecretNotFound"
    """A Secret, or a key of one, that the spec refers to does not exist."""
    SINK_NOT_SUPPORTED = "SinkNotSupported"
    """The relay's version lacks this sink, or the sink's package is not installed."""

    PROGRESSING = "Progressing"
    """Reconciliation is in progress: pods roll out, partitions move."""
    STARTING = "Starting"
    """No relay has reported yet."""
    NOT_ENOUGH_RELAYS = "NotEnoughRelays"
    PARTITIONS_WITHOUT_OWNER = "PartitionsWithoutOwner"
    RELAY_SILENT = "RelaySilent"
    """A relay hangs or is cut off. Others take over its partitions; the message names it."""
    CONNECTING = "Connecting"
    """The destination has not answered yet, and no attempt to reach it has failed."""

    FORBIDDEN = "Forbidden"
    """The API server refused a request of the operator (quota, policy, missing permission). The operator retries."""

    DATABASE_UNREACHABLE = "DatabaseUnreachable"
    """No session on the database, because of the network, the password or the server."""
    DATABASE_IN_RECOVERY = "DatabaseInRecovery"
    """The server is a standby: relays need the primary."""
    FOREIGN_DATABASE = "ForeignDatabase"
    """The cursors belong to another database system (a restored dump): run ``mailboat rebase`` to continue."""
    SCHEMA_MISMATCH = "SchemaMismatch"
    """Tables, columns or privileges are missing: run the SQL in the message, or ``mailboat migrate``."""
    ROLES_MISSING = "RolesMissing"
    """The schema is up to date, but the group roles are missing: an administrator should run the SQL in the message."""
    DATABASE_CHANGED = "DatabaseChanged"
    """Event: the relays use another database, or another database system, than before."""
    PARTITIONS_RUN_OUT = "PartitionsRunOut"
    """Time partitions exist for less than seven days ahead: writes would fail after the last one."""

    NO_CONSUMERS = "NoConsumers"
    """No pod has the label ``mailboat.dev/subscription`` with the subscription's name."""
    CONSUMERS_SILENT = "ConsumersSilent"
    """Pods have the label, but none answers on its status port."""
    SOURCE_UNAVAILABLE = "SourceUnavailable"
    """The broker can't be reached. Consumers resume automatically."""
    IDEMPOTENCY_UNAVAILABLE = "IdempotencyUnavailable"
    DEAD_LETTER_UNAVAILABLE = "DeadLetterUnavailable"
    """The dead-letter topic can't be reached or refuses messages. No event is committed past a failed one."""
    RELIABLE = "Reliable"
    """The store keeps handled events for their time to live, as far as consumers can see."""
    EVICTS_KEYS = "EvictsKeys"
    """Redis removes keys when its memory is full (``maxmemory-policy``): handled events may be forgotten."""
    MEMORY_LOST = "MemoryLost"
    """Redis lost its keys (a restart without persistence, FLUSHALL): redelivered events are handled again."""
    NOT_REPLICATED = "NotReplicated"
    """Fewer replicas than ``idempotency.redis.replicas`` confirmed the last writes."""
    TOO_MANY_DEAD_LETTERS = "TooManyDeadLetters"
    """So many dead letters in a row that ``delivery.deadLetter.stopAt`` stopped the consumer."""

    SINK_UNAVAILABLE = "SinkUnavailable"
    """The destination is unavailable or refuses all events. No attempt is counted; delivery resumes automatically."""
    ATTEMPTS_EXHAUSTED = "AttemptsExhausted"
    """Events used up their attempts: dead letters, or blocked keys."""
    PAUSED_BY_SPEC = "PausedBySpec"
    PAUSED_BY_COMMAND = "PausedByCommand"
    """``mailboat pause``, or an update of ``mailboat.subscriptions``."""
    UNDELIVERED_EVENTS = "UndeliveredEvents"
    OLD_SNAPSHOT = "OldSnapshot"
    """A transaction, prepared transaction or replication slot holds an old snapshot: end it as the message says."""
    SIDECAR_MISSING = "SidecarMissing"
    """Pods were created while the webhook was unavailable, or the injection failed: restart them."""
    RESTART_NEEDED = "RestartNeeded"
    """A change (a new volume) can't be applied to running pods: restart them."""


class Condition(StatusModel):
    """metav1.Condition."""

    type: str
    """The question, for example Ready."""
    status: ConditionStatus
    """The answer: True, False or Unknown."""
    reason: str = ""
    """The answer for programs: one word in CamelCase. Default: empty."""
    message: str = ""
    """The answer for people, and what to do next. Default: empty."""
    last_transition_time: Timestamp | None = None
    """When status changed last, RFC 3339. Default: none."""
    observed_generation: int = 0
    """Generation of the resource that this was said about. Default: 0."""


class ResourceStatus(StatusModel):
    """Status fields of both kinds."""

    observed_generation: int = 0
    """Generation of the resource that this status describes. Default: 0, nothing seen yet."""
    conditions: tuple[Condition, ...] = Field(default=(), json_schema_extra=keyed_by("type"))
    """Conditions, at most one of each type. Default: none."""


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
