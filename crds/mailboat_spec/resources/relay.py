"""OutboxRelay: one outbox, and the relays that serve it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from mailboat_spec.base import Model, Refusal, yaml_name
from mailboat_spec.cel_rules import Because, Rule, unchangeable, unless_given
from mailboat_spec.durations import Duration, between, not_longer
from mailboat_spec.formats import ColumnName, TableName
from mailboat_spec.names import MAX_RELAY_NAME
from mailboat_spec.resources.connections import Connection
from mailboat_spec.resources.resource import Resource
from mailboat_spec.resources.status import OutboxRelayStatus
from mailboat_spec.resources.template import PodTemplate
from mailboat_spec.sizes import Size

DEFAULT_REPLICAS: Final = 2


class Pooler(StrEnum):
    """Connection pooling between a relay and Postgres."""

    AUTO = "Auto"
    """Detect by probing."""
    DIRECT = "Direct"
    """No pooler, or one in session mode: sessions keep their locks and LISTEN."""
    TRANSACTION = "Transaction"
    """A pooler in transaction mode (PgBouncer): no LISTEN, no session locks, no named prepared statements."""


class Tracking(StrEnum):
    """Storage of progress."""

    LOG = "Log"
    """Append-only table; each subscription has its own cursors."""
    ROWS = "Rows"
    """Marks on the row (published_at, attempt_count); one subscription per table."""


class ColumnsPreset(StrEnum):
    """Named column layouts."""

    MAILBOAT = "mailboat"
    ROWS = "rows"
    DEBEZIUM = "debezium"


class RetentionPolicy(StrEnum):
    """Policy for old events that are not delivered yet."""

    HOLD = "Hold"
    """Undelivered events are kept without a limit."""
    DROP = "Drop"
    """Undelivered events are dropped beyond a hard limit of age or size."""


class Durability(StrEnum):
    """Durability required of an event before it is published."""

    COMMITTED = "Committed"
    FLUSHED = "Flushed"
    REPLICATED = "Replicated"


class Runtime(StrEnum):
    """Where relays run."""

    DEPLOYMENT = "Deployment"
    SIDECAR = "Sidecar"


class Notify(StrEnum):
    """When writers send a wake-up (NOTIFY) to the relay."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Database(Connection):
    """The Postgres primary that holds the outbox."""

    schemes: ClassVar[tuple[str, ...]] = ("postgresql", "postgres")

    pooler: Pooler = Field(
        default=Pooler.AUTO,
        description="What the URL leads to: Direct (Postgres, or a pooler in session mode), Transaction (a pooler in "
        "transaction mode), or Auto (find out). Default: Auto.",
    )


class Columns(Model):
    """Column names of an existing table that differ from the preset."""

    preset: ColumnsPreset | None = Field(
        default=None,
        description="Layout to start from: mailboat (columns are called as the fields are, in snake_case), debezium "
        "(id: position, eventId: id, eventType: type, aggregateType: aggregatetype, aggregateId and key: aggregateid; "
        "the others as mailboat) or rows (not in this release). Default: none, mailboat for Log and rows for Rows.",
    )
    id: ColumnName | None = Field(default=None, description="Position of the event. Default: the preset's.")
    event_id: ColumnName | None = Field(default=None, description="Identity of the event. Default: the preset's.")
    event_type: ColumnName | None = Field(default=None, description="Type of the event. Default: the preset's.")
    aggregate_type: ColumnName | None = Field(default=None, description="Type of the aggregate. Default: the preset's.")
    aggregate_id: ColumnName | None = Field(default=None, description="Id of the aggregate. Default: the preset's.")
    key: ColumnName | None = Field(default=None, description="What order is kept by. Default: the preset's.")
    payload: ColumnName | None = Field(default=None, description="The event's data. Default: the preset's.")
    content_type: ColumnName | None = Field(default=None, description="Media type of the data. Default: the preset's.")
    headers: ColumnName | None = Field(default=None, description="The application's headers. Default: the preset's.")
    tags: ColumnName | None = Field(default=None, description="Tags of the event. Default: the preset's.")
    traceparent: ColumnName | None = Field(default=None, description="W3C trace context. Default: the preset's.")
    created_at: ColumnName | None = Field(
        default=None, description="When the event was written. Default: the preset's."
    )
    published_at: ColumnName | None = Field(
        default=None, description="Rows only: when the event was published. Default: the preset's."
    )
    attempt_count: ColumnName | None = Field(
        default=None, description="Rows only: attempts so far. Default: the preset's."
    )
    last_error: ColumnName | None = Field(default=None, description="Rows only: last failure. Default: the preset's.")


_NO_LIMIT: Final = "Drop needs a limit: set maxAge or maxBytes, or use Hold"
_NEEDLESS_LIMIT: Final = "has no effect with policy Hold: set policy: Drop or remove it"
_ALL_REMOVED: Final = "must be more than 0: everything would be removed"


class Retention(Model):
    """Retention of events in the outbox."""

    after: Annotated[Duration, between("1m", "87600h")] = Field(
        default=Duration.parse("720h"),
        description="Age after which delivered events are removed, as a duration between 1m and 87600h. Default: 720h.",
    )
    policy: RetentionPolicy = Field(
        default=RetentionPolicy.HOLD,
        description="What happens to events that are older and not delivered: Hold (kept) or Drop (removed beyond "
        "maxAge or maxBytes). Default: Hold.",
    )
    max_age: Annotated[Duration, between("1m", "87600h")] | None = Field(
        default=None,
        description="Drop only: age beyond which undelivered events are removed too, not below after. Default: none.",
    )
    max_bytes: Size | None = Field(
        default=None,
        description='Drop only: size of the outbox, in bytes ("10Gi"), beyond which the oldest events are removed. '
        "Default: none.",
    )

    def wrong_combinations(self) -> Iterator[Refusal]:
        limits = [name for name, limit in (("maxAge", self.max_age), ("maxBytes", self.max_bytes)) if limit is not None]
        if self.policy is RetentionPolicy.DROP and not limits:
            yield Refusal(("policy",), _NO_LIMIT)
        if self.policy is RetentionPolicy.HOLD:
            for limit in limits:
                yield Refusal((limit,), _NEEDLESS_LIMIT)
        if self.max_age is not None and self.max_age < self.after:
            yield Refusal(("maxAge",), f"is {self.max_age}, shorter than after ({self.after}): raise it or lower after")
        if self.max_bytes is not None and self.max_bytes.bytes == 0:
            yield Refusal(("maxBytes",), _ALL_REMOVED)

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        yield Rule(
            "self.policy != 'Drop' || has(self.maxAge) || has(self.maxBytes)",
            _NO_LIMIT,
            field="policy",
        )
        for limit in ("maxAge", "maxBytes"):
            yield Rule(unless_given(limit, "self.policy == 'Drop'"), _NEEDLESS_LIMIT, field=limit)
        yield Rule(
            unless_given("maxAge", not_longer("after", than="maxAge")),
            "is shorter than after: raise it or lower after",
            field="maxAge",
            message_expression="'is ' + self.maxAge + ', shorter than after (' + self.after + '): "
            "raise it or lower after'",
        )
        more_than_none = (
            "(type(self.maxBytes) == int ? self.maxBytes > 0 : !isQuantity(self.maxBytes) || "
            "quantity(self.maxBytes).isGreaterThan(quantity('0')))"
        )
        yield Rule(unless_given("maxBytes", more_than_none), _ALL_REMOVED, field="maxBytes")


_MARKS: Final = ("published_at", "attempt_count", "last_error")
_MARK_WITHOUT_ROWS: Final = "is for tracking Rows only, which is not in this release: remove it"
_PRESET_REMEDIES: Final = {
    ColumnsPreset.ROWS: "rows goes with tracking Rows, which is not in this release: use mailboat or debezium",
    ColumnsPreset.MAILBOAT: "mailboat goes with tracking Log: set tracking: Log, the only one in this release",
}


class Outbox(Model):
    """The table that applications insert events into."""

    tracking: Tracking = Field(
        default=Tracking.LOG,
        description="How progress is kept: Log (cursors beside an append-only table) or Rows (marks on the row; not in "
        "this release). Default: Log.",
    )
    table: TableName = Field(
        default="mailboat.outbox", description="The table, as schema.table. Default: mailboat.outbox."
    )
    columns: Columns = Field(
        default_factory=Columns,
        description="Names of columns of an existing table. Default: the tracking's own layout.",
    )
    manage_schema: bool = Field(
        default=True,
        strict=True,
        description="true: tables are created and migrated; false: they are only verified, and what is missing is "
        "said. Default: true.",
    )
    retention: Retention = Field(default_factory=Retention, description="How long events stay. Default: 720h, Hold.")
    durability: Durability = Field(
        default=Durability.FLUSHED,
        description="How safe an event must be before it is published: Committed (visible), Flushed (on the "
        "primary's disk) or Replicated (on the synchronous standbys). Default: Flushed.",
    )

    def wrong_combinations(self) -> Iterator[Refusal]:
        if self.tracking is Tracking.LOG:
            for name in _MARKS:
                if getattr(self.columns, name) is not None:
                    yield Refusal(("columns", yaml_name(name)), _MARK_WITHOUT_ROWS)
        wrong = ColumnsPreset.ROWS if self.tracking is Tracking.LOG else ColumnsPreset.MAILBOAT
        if self.columns.preset is wrong:
            yield Refusal(("columns", "preset"), _PRESET_REMEDIES[wrong])

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        for name in map(yaml_name, _MARKS):
            yield Rule(
                f"self.tracking == 'Rows' || !has(self.columns) || !has(self.columns.{name})",
                _MARK_WITHOUT_ROWS,
                field=f"columns.{name}",
            )
        for wrong, right in ((ColumnsPreset.ROWS, Tracking.ROWS), (ColumnsPreset.MAILBOAT, Tracking.LOG)):
            yield Rule(
                f"self.tracking == '{right}' || !has(self.columns) || !has(self.columns.preset) "
                f"|| self.columns.preset != '{wrong}'",
                _PRESET_REMEDIES[wrong],
                field="columns.preset",
            )
        for fixed in ("tracking", "table"):
            yield unchangeable(
                fixed, "progress is kept by it; create another OutboxRelay with subscriptions of its own"
            )


class Wake(Model):
    """Detection of new events. Relays rely on polling; NOTIFY only shortens the wait."""

    notify: Notify = Field(
        default=Notify.AUTO,
        description="When writers ring (NOTIFY): Auto (only while a relay sleeps), Always or Never. Default: Auto.",
    )
    poll_interval: Annotated[Duration, between("1ms", "10m")] = Field(
        default=Duration.parse("500ms"),
        description="Time between two polls, as a duration between 1ms and 10m. Default: 500ms.",
    )
    idle_after: int = Field(
        default=3,
        strict=True,
        ge=1,
        le=1_000_000,
        description="Empty polls after which the interval begins to double. Default: 3.",
    )
    max_idle_interval: Annotated[Duration, between("1ms", "1h")] = Field(
        default=Duration.parse("60s"),
        description="Longest interval between two polls, as a duration up to 1h. Default: 60s.",
    )

    def wrong_combinations(self) -> Iterator[Refusal]:
        if self.poll_interval > self.max_idle_interval:
            yield Refusal(
                ("pollInterval",),
                f"is {self.poll_interval}, longer than maxIdleInterval ({self.max_idle_interval}): make it shorter or "
                "raise maxIdleInterval",
            )

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        yield Rule(
            not_longer("pollInterval", than="maxIdleInterval"),
            "is longer than maxIdleInterval: make it shorter or raise maxIdleInterval",
            field="pollInterval",
            message_expression="'is ' + self.pollInterval + ', longer than maxIdleInterval (' + self.maxIdleInterval "
            "+ '): make it shorter or raise maxIdleInterval'",
        )


def _replicas(given: dict[str, Any]) -> int | None:
    return DEFAULT_REPLICAS if given["runtime"] is Runtime.DEPLOYMENT else None


_REPLICAS_OF_A_SIDECAR: Final = "a Sidecar has no replicas of its own, it runs in the application's pods: remove it"


class OutboxRelaySpec(Model):
    """Desired state of a relay."""

    database: Database = Field(description="The database that holds the outbox: urlSecretRef, or url.")
    outbox: Outbox = Field(default_factory=Outbox, description="The table. Default: mailboat.outbox, managed.")
    runtime: Runtime = Field(
        default=Runtime.DEPLOYMENT,
        description="Where relays run: Deployment (pods of their own) or Sidecar (inside the application's pods). "
        "Default: Deployment.",
    )
    replicas: int | None = Field(
        default_factory=_replicas,
        strict=True,
        ge=0,
        le=1000,
        description=f"Deployment only: how many relays run. Default: {DEFAULT_REPLICAS}; a Sidecar has none.",
    )
    wake: Wake = Field(default_factory=Wake, description="How relays learn of new events. Default: polls of 500ms.")
    template: PodTemplate = Field(default_factory=PodTemplate, description="Additions to the pods. Default: none.")

    def wrong_combinations(self) -> Iterator[Refusal]:
        if self.runtime is Runtime.SIDECAR and self.replicas is not None:
            yield Refusal(("replicas",), _REPLICAS_OF_A_SIDECAR)

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        yield Rule(
            "self.runtime != 'Sidecar' || !has(self.replicas)",
            _REPLICAS_OF_A_SIDECAR,
            field="replicas",
            because=Because.FORBIDDEN,
        )


class OutboxRelay(Resource):
    """One outbox, and the relays that serve it."""

    max_name: ClassVar[int] = MAX_RELAY_NAME
    names_a_service: ClassVar[bool] = True

    kind: Literal["OutboxRelay"] = Field(default="OutboxRelay", description="Always OutboxRelay. Default: OutboxRelay.")
    spec: OutboxRelaySpec = Field(description="What the relay should be.")
    status: OutboxRelayStatus | None = Field(
        default=None, description="How it is doing. Written by the operator. Default: none."
    )
