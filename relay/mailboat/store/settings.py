"""Settings of a relay's outbox access, common to all stores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from mailboat.store.table import TableLayout
from mailboat_spec import Notify, Pooler


@dataclass(frozen=True, slots=True)
class RelayIdentity:
    """Identity of a relay. Every process has a new incarnation."""

    id: str
    incarnation: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of one read. A window beyond ``small_rows`` or ``bytes`` is read in chunks."""

    small_rows: int = 2000
    rows: int = 3000
    """Rows of a chunk."""
    bytes: int = 8 * 1024 * 1024
    """Bytes of a chunk. A single row may be larger."""
    row_bytes: int = 17 * 1024 * 1024
    """Bytes of a single row: a payload of 16 MiB plus metadata. A larger row is not read; its event is refused."""

    def after(self, crash_count: int) -> ReadLimits:
        """Return the limits for a crash count: a quarter per crash, down to one event."""
        share = 4**crash_count
        return replace(self, rows=max(1, self.rows // share), bytes=self.bytes // share) if crash_count else self


_SYNC_LEVELS = {"Committed": "off", "Flushed": "local", "Replicated": "on"}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    layout: TableLayout = field(default_factory=TableLayout)
    durability: Literal["Committed", "Flushed", "Replicated"] = "Flushed"
    notify: Notify = Notify.AUTO
    pooler: Pooler = Pooler.AUTO
    lease_ttl: float = 15.0
    overdue_after: float = 3.0
    """Seconds without a heartbeat after which a relay counts as dead if its liveness lock is free."""
    deadline: float = 30.0
    """Seconds without a result after which the database counts as unavailable."""
    limits: ReadLimits = field(default_factory=ReadLimits)
    lag_bound: int = 100_000

    @property
    def sync_level(self) -> str:
        """Value of ``synchronous_commit`` for a transaction that must be durable before events are published."""
        return _SYNC_LEVELS[self.durability]
