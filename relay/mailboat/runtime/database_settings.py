"""The settings of a database connection. If any of them changes, the relay reconnects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from mailboat.runtime.timings import Timings
from mailboat.store.settings import ReadLimits, StoreSettings
from mailboat.store.table import TableLayout, renamed
from mailboat_spec import OutboxRelaySpec, Retention


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """Connection settings, compared by value: a configuration with equal settings keeps the connection."""

    settings: StoreSettings
    retention: Retention
    manage_schema: bool
    url: str = field(repr=False)

    @classmethod
    def wanted_by(cls, spec: OutboxRelaySpec, timings: Timings, limits: ReadLimits, url: str) -> Self:
        settings = StoreSettings(
            layout=TableLayout(spec.outbox.table, renamed(spec.outbox.columns)),
            durability=spec.outbox.durability,
            notify=spec.wake.notify,
            pooler=spec.database.pooler,
            lease_ttl=timings.lease_ttl,
            overdue_after=timings.overdue_after,
            deadline=timings.deadline,
            limits=limits,
        )
        return cls(settings, spec.outbox.retention, spec.outbox.manage_schema, url)
