"""OutboxRelay: one outbox, and the relays that serve it."""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from mailboat_spec.base import Model
from mailboat_spec.formats import ColumnName, TableName
from mailboat_spec.names import MAX_RELAY_NAME
from mailboat_spec.references import Connection
from mailboat_spec.resources.resource import Resource, name_constraints
from mailboat_spec.resources.status import OutboxRelayStatus
from mailboat_spec.resources.template import PodTemplate
from mailboat_spec.rules import Constraint, Predicate, absent, differs, equals, given, unchangeable
from mailboat_spec.scalars import Duration, Size, at_most, between, not_longer

DEFAULT_REPLICAS: Final = 2


class Pooler(StrEnum):
    AUTO = "Auto"
    DIRECT = "Direct"
    """No pooler, or one in session mode: sessions keep their locks and LISTEN."""
    TRANSACTION = "Transaction"
    """A pooler in transaction mode (PgBouncer): no LISTEN, no session locks, no named prepared statements."""


class Runtime(StrEnum):
    DEPLOYMENT = "Deployment"
    SIDECAR = "Sidecar"


class Notify(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Database(Connection):
    """The Postgres primary that holds the outbox."""

    schemes = ("postgresql", "postgres")

    pooler: Pooler = Pooler.AUTO
    """What the URL leads to: Direct (Postgres, or a pooler in session mode), Transaction (a pooler in transaction
    mode), or Auto (find out). Default: Auto."""


class Columns(Model):
    """Column names of an existing table that differ from the preset."""

    preset: Literal["mailboat", "debezium"] | None = None
    """Layout to start from: mailboat (columns have the names of the fields, in snake_case) or debezium (id: position,
    eventId: id, eventType: type, aggregateType: aggregatetype, aggregateId and key: aggregateid; the others as
    mailboat). Default: none, mailboat."""
    id: ColumnName | None = None
    """Position of the event. Default: the preset's."""
    event_id: ColumnName | None = None
    """Identity of the event. Default: the preset's."""
    event_type: ColumnName | None = None
    """Type of the event. Default: the preset's."""
    aggregate_type: ColumnName | None = None
    """Type of the aggregate. Default: the preset's."""
    aggregate_id: ColumnName | None = None
    """Id of the aggregate. Default: the preset's."""
    key: ColumnName | None = None
    """What order is kept by. Default: the preset's."""
    payload: ColumnName | None = None
    """The event's data. Default: the preset's."""
    content_type: ColumnName | None = None
    """Media type of the data. Default: the preset's."""
    headers: ColumnName | None = None
    """The application's headers. Default: the preset's."""
    tags: ColumnName | None = None
    """Tags of the event. Default: the preset's."""
    traceparent: ColumnName | None = None
    """W3C trace context. Default: the preset's."""
    created_at: ColumnName | None = None
    """When the event was written. Default: the preset's."""


_SOME_SIZE: Final = Predicate(
    "(type(self.maxBytes) == int ? self.maxBytes > 0 : !isQuantity(self.maxBytes) || "
    "quantity(self.maxBytes).isGreaterThan(quantity('0')))",
    lambda retention: retention.max_bytes.bytes > 0,
)


class Retention(Model):
    """Retention of events in the outbox."""

    constraints = (
        Constraint(
            "policy",
            "Drop needs a limit: set maxAge or maxBytes, or use Hold",
            differs("policy", "Drop") | given("maxAge") | given("maxBytes"),
        ),
        *(
            Constraint(
                limit,
                "has no effect with policy Hold: set policy: Drop or remove it",
                absent(limit) | equals("policy", "Drop"),
            )
            for limit in ("maxAge", "maxBytes")
        ),
        Constraint(
            "maxAge",
            "is shorter than after: raise it or lower after",
            absent("maxAge") | at_most("after", "maxAge"),
            detailed="is {maxAge}, shorter than after ({after}): raise it or lower after",
        ),
        Constraint("maxBytes", "must be more than 0: everything would be removed", absent("maxBytes") | _SOME_SIZE),
    )

    after: Annotated[Duration, between("1m", "87600h")] = Duration.parse("720h")
    """Age after which delivered events are removed, as a duration between 1m and 87600h. Default: 720h."""
    policy: Literal["Hold", "Drop"] = "Hold"
    """What happens to events that are older and not delivered: Hold (kept) or Drop (removed beyond maxAge or maxBytes).
    Default: Hold."""
    max_age: Annotated[Duration, between("1m", "87600h")] | None = None
    """Drop only: age beyond which undelivered events are removed too, not below after. Default: none."""
    max_bytes: Size | None = None
    """Drop only: size of the outbox, in bytes ("10Gi"), beyond which the oldest events are removed. Default: none."""


class Outbox(Model):
    """The table that applications insert events into."""

    constraints = (
        unchangeable("table", "progress is kept by it; create another OutboxRelay with subscriptions of its own"),
    )

    tracking: Literal["Log"] = "Log"
    """How progress is stored: Log (cursors beside an append-only table). Default: Log."""
    table: TableName = "mailboat.outbox"
    """The table, as schema.table. Default: mailboat.outbox."""
    columns: Columns = Field(default_factory=Columns)
    """Names of columns of an existing table. Default: the layout of mailboat.outbox."""
    manage_schema: bool = Field(default=True, strict=True)
    """true: tables are created and migrated; false: they are only verified, and what is missing is said. Default:
    true."""
    retention: Retention = Field(default_factory=Retention)
    """How long events stay. Default: 720h, Hold."""
    durability: Literal["Committed", "Flushed", "Replicated"] = "Flushed"
    """How safe an event must be before it is published: Committed (visible), Flushed (on the primary's disk) or
    Replicated (on the synchronous standbys). Default: Flushed."""


class Wake(Model):
    """Detection of new events. Relays rely on polling; NOTIFY only shortens the wait."""

    constraints = (not_longer("pollInterval", than="maxIdleInterval"),)

    notify: Notify = Notify.AUTO
    """When writers send NOTIFY: Auto (only while a relay is idle), Always or Never. Default: Auto."""
    poll_interval: Annotated[Duration, between("1ms", "10m")] = Duration.parse("500ms")
    """Time between two polls, as a duration between 1ms and 10m. Default: 500ms."""
    idle_after: int = Field(default=3, strict=True, ge=1, le=1_000_000)
    """Empty polls after which the interval begins to double. Default: 3."""
    max_idle_interval: Annotated[Duration, between("1ms", "1h")] = Duration.parse("60s")
    """Longest interval between two polls, as a duration up to 1h. Default: 60s."""


def _replicas(given: dict[str, Any]) -> int | None:
    return DEFAULT_REPLICAS if given["runtime"] is Runtime.DEPLOYMENT else None


class OutboxRelaySpec(Model):
    """Desired state of a relay."""

    constraints = (
        Constraint(
            "replicas",
            "a Sidecar has no replicas of its own, it runs in the application's pods: remove it",
            differs("runtime", "Sidecar") | absent("replicas"),
            "FieldValueForbidden",
        ),
    )

    database: Database
    """The database that holds the outbox: urlSecretRef, or url."""
    outbox: Outbox = Field(default_factory=Outbox)
    """The table. Default: mailboat.outbox, managed."""
    runtime: Runtime = Runtime.DEPLOYMENT
    """Where relays run: Deployment (pods of their own) or Sidecar (inside the application's pods). Default:
    Deployment."""
    replicas: int | None = Field(default_factory=_replicas, strict=True, ge=0, le=1000)
    """Deployment only: how many relays run. Default: 2; a Sidecar has none."""
    wake: Wake = Field(default_factory=Wake)
    """How relays learn of new events. Default: polls of 500ms."""
    template: PodTemplate = Field(default_factory=PodTemplate)
    """Additions to the pods. Default: none."""


class OutboxRelay(Resource):
    """One outbox, and the relays that serve it."""

    constraints = (
        *name_constraints(MAX_RELAY_NAME),
        Constraint(
            "metadata.name",
            "must begin with a letter: a Service is named after it, and its name may not begin with a digit",
            Predicate("!self.metadata.name.matches('^[0-9]')", lambda relay: not relay.metadata.name[0].isdigit()),
        ),
    )

    kind: Literal["OutboxRelay"] = "OutboxRelay"
    """Always OutboxRelay. Default: OutboxRelay."""
    spec: OutboxRelaySpec
    """What the relay should be."""
    status: OutboxRelayStatus | None = None
    """How it is doing. Written by the operator. Default: none."""
