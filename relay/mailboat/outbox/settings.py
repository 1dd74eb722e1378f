"""How a relay uses an outbox, whichever store it is in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mailboat.outbox.layout import Layout
from mailboat_spec import Durability, Notify, Pooler


@dataclass(frozen=True, slots=True)
class RelayIdentity:
    """Who a relay is. The incarnation is new with every process."""

    id: str
    incarnation: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much is read at once, of whole rows. A window beyond ``small_rows`` or ``bytes`` is walked in stretches."""

    small_rows: int = 2000
    rows: int = 3000
    """Of a stretch."""
    bytes: int = 8 * 1024 * 1024
    """Of a stretch; a single row may have more."""
    row_bytes: int = 17 * 1024 * 1024
    """Of a single row: a payload of 16 MiB, and what comes with it. A larger row is not read, and given up."""

    def after(self, deaths: int) -> ReadLimits:
        """Read less where relays died: a quarter for each death, down to one event."""
        share = 4**deaths
        return replace(self, rows=max(1, self.rows // share), bytes=self.bytes // share) if deaths else self


_SYNC_LEVELS = {Durability.COMMITTED: "off", Durability.FLUSHED: "local", Durability.REPLICATED: "on"}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a relay uses its outbox."""

    layout: Layout = field(default_factory=Layout)
    durability: Durability = Durability.FLUSHED
    notify: Notify = Notify.AUTO
    pooler: Pooler = Pooler.AUTO
    lease_ttl: float = field(default=60.0, compare=False)
    """Not a part of what makes two settings equal: it may grow while a relay is connected."""
    overdue_after: float = 3.0
    """Seconds without a heartbeat after which a relay whose liveness lock is free counts as dead."""
    deadline: float = 30.0
    """Seconds after which a statement without an answer means that the database is away."""
    limits: ReadLimits = field(default_factory=ReadLimits)
    lag_bound: int = 100_000

    @property
    def sync_level(self) -> str:
        """``synchronous_commit`` of a transaction behind which events are published."""
        return _SYNC_LEVELS[self.durability]
