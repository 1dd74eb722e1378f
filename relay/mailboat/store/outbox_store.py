"""The store protocol between delivery and an outbox, with its value types.

The terms are those of ``docs/windows.md``. A cursor is *closed* if everything visible in its ``settled_snapshot`` is
settled, and *open* while the window from there up to its ``window_snapshot`` is being delivered. ``position`` is the id
up to which the window is settled. Snapshots are opaque text: only a store can compare them with events.

Two rules make crashes and failovers harmless. Every store must keep them:

- A window is committed, at the durability of the outbox, before ``tick`` returns its first event.
- Every change of progress carries the expected epoch *and* window. If either differs from the stored one, the change
  is not applied and the cursor is returned as lost.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mailboat.model import OutboxEvent


class CursorKey(NamedTuple):
    """Key of a cursor: subscription number (in the store) and partition."""

    subscription: int
    partition: int


class Lease(NamedTuple):
    """Ownership of one partition, valid while the store holds the same epoch."""

    key: CursorKey
    epoch: str


@dataclass(frozen=True, slots=True)
class Window:
    """The events that became visible between two snapshots.

    ``lowest`` is the id at which the scan of a large window begins; a few late events may precede it. None for a
    window of at most one read.
    """

    settled_snapshot: str
    window_snapshot: str
    lowest: int | None = None
    highest: int | None = None
    carry_over: int = 0
    """Number of the subscription whose previous layout left unsettled events (see ``repartition``); 0 if none.
    Such a window is never shared, even if another subscription has the same snapshots."""


@dataclass(frozen=True, slots=True)
class Cursor:
    lease: Lease
    settled_snapshot: str
    window: Window | None
    position: int
    sequence: int
    crash_count: int
    """Relays that died at this position. Without a window: 1 if a relay died, possibly during a read."""


@dataclass(frozen=True, slots=True)
class Subscription:
    number: int
    name: str
    partitions: int
    generation: int
    paused: bool


@dataclass(frozen=True, slots=True)
class LastFailure:
    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Park:
    """Park an event, as the failed head of its key (``failure`` given) or behind it.

    If ``ordinal`` is given, update the row after another failure, or before the attempt of a crash suspect.
    """

    event: OutboxEvent
    sequence: int
    attempts: int = 0
    retry_in: float | None = None
    """Seconds until the next attempt. None if the event is blocked or waits behind the head of its key."""
    failure: LastFailure | None = None
    blocked: bool = False
    suspect: bool = False
    """See ``Parked``. Not changed in a row that exists."""
    pending_dead_letter: bool = False
    ordinal: int | None = None


class Series(NamedTuple):
    """Scope of sequence numbers, which are gapless within one series."""

    partition: int
    generation: int


@dataclass(frozen=True, slots=True)
class Parked:
    """An event in the parking lot, as read for its next attempt."""

    ordinal: int
    event: OutboxEvent
    sequence: int
    series: Series
    """Series of the partition that first read the event, regardless of later repartitioning."""
    attempts: int
    replay: bool
    suspect: bool
    """Crash suspect: relays died while the event was in flight. Its attempt is counted before the event is sent."""
    blocked: bool
    pending_dead_letter: bool
    """Pending dead letter: attempts are over, but the dead-letter topic has not accepted the event yet."""
    failure: LastFailure | None
    first_failed_at: str | None


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter to store. ``ordinal`` identifies the parked row if the event was parked."""

    event: OutboxEvent
    sequence: int
    attempts: int
    failure: LastFailure
    ordinal: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """Results of a partition's events, applied atomically."""

    lease: Lease
    window_snapshot: str | None
    """End of the window that is settled. None if only parked events are concerned."""
    position: int = 0
    sequence: int = 0
    closes: bool = False
    """Close the window: ``settled_snapshot`` moves to ``window_snapshot``."""
    park: tuple[Park, ...] = ()
    unpark: tuple[int, ...] = ()
    dead: tuple[Dead, ...] = ()
    ordered: bool = True
    """Only the first parked event of a key may be retried. If False, each parked event is retried separately."""
    arrange: frozenset[str] = frozenset()
    """Keys whose events were parked by a previous owner, possibly with a different value of ``ordered``."""
    in_flight: bool | None = None
    """True if events are in flight from now on, so that a death of this relay counts as a crash; None: unchanged.
    After a claim, events count as in flight until a settlement sets False."""

    @property
    def durable(self) -> bool:
        """True if the settlement must survive a crash. Plain progress may be lost, at the cost of duplicates."""
        return bool(self.park or self.unpark or self.dead or self.arrange)


@dataclass(frozen=True, slots=True)
class CursorGroup:
    """Closed cursors with the same ``settled_snapshot``, at the head of the log. One read serves them all."""

    settled_snapshot: str
    members: tuple[Lease, ...]
    cautious: bool = False
    """A relay died, possibly while reading for a member. Measure the next window before reading it, even if small."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A window too large for one read, with its bounds, to be opened by a tick."""

    window: Window
    members: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """A window that was opened for some members of a group. ``events`` is None if it is too large for one read."""

    window: Window
    members: tuple[Lease, ...]
    events: Mapping[CursorKey, Sequence[OutboxEvent]] | None


@dataclass(frozen=True, slots=True)
class TickResult:
    lost: frozenset[CursorKey]
    opened: tuple[Opened, ...]
    advanced: Mapping[Lease, str]
    """The new ``settled_snapshot`` of members that no event up to it matched."""
    overflowing: tuple[CursorGroup, ...] = ()
    """Groups with more new events than one read holds. Their window must be measured before it can be opened."""

    @property
    def quiet(self) -> bool:
        return not self.opened and not self.advanced and not self.overflowing


@dataclass(frozen=True, slots=True)
class Chunk:
    events: Mapping[CursorKey, Sequence[OutboxEvent]]
    reached: int
    """The id up to which the window was scanned."""
    last: bool
    """True if the window has no events after this chunk."""


@dataclass(frozen=True, slots=True)
class RelayPeer:
    """A relay registered in the store; may be this relay."""

    id: str
    serves: frozenset[int]
    alive: bool
    silent: bool = False
    """Alive, but several heartbeats are missing: the relay hangs or is cut off, and its leases still run."""


@dataclass(frozen=True, slots=True)
class PartitionOwner:
    key: CursorKey
    owner: str | None
    assigned_to: str | None


@dataclass(frozen=True, slots=True)
class Membership:
    peers: tuple[RelayPeer, ...]
    holdings: tuple[PartitionOwner, ...]
    subscriptions: Mapping[int, Subscription]
    due: frozenset[CursorKey] = frozenset()
    """Partitions with a parked event that is due."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Lag of one partition. Counting stops after a bounded number of scanned events, matching or not."""

    pending: int
    oldest_age: float | None
    """Seconds since the oldest pending event was written."""
    bounded: bool = False
    """Counting stopped at the bound, so ``pending`` is a lower bound. It is 0 if no scanned event is pending for
    this partition."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Lag and parked events of one subscription by partition, with its number of dead letters."""

    partitions: Mapping[int, Lag] = field(default_factory=dict)
    parked: Mapping[int, int] = field(default_factory=dict)
    dead: int = 0
    blocked: int = 0
    """Events out of attempts that block their keys until an operator intervenes."""


class OutboxStore(Protocol):
    """One relay's access to one outbox. Every method may raise ``DatabaseUnavailable``."""

    async def beat(self) -> Membership:
        """Renew all leases and return the state of ownership. Raise ``LeaseLost`` if this relay counts as dead."""

    def withdraw(self, number: int) -> None:
        """Stop serving a subscription. This relay must deliver none of its partitions any longer."""

    async def wait_for_notification(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a wake-up (NOTIFY) from a writer. Return True if one arrived."""

    async def claim(self, keys: Collection[CursorKey]) -> list[Cursor]:
        """Acquire the cursors that no live relay owns, and return those that were acquired."""

    async def renew(self, leases: Collection[Lease]) -> list[Cursor]:
        """Give the cursors of this relay a new epoch, and return those that it still owned."""

    async def release(self, leases: Collection[Lease]) -> None:
        """Release leases, so that another relay can acquire the partitions immediately."""

    async def tick(
        self, settlements: Sequence[Settlement], groups: Sequence[CursorGroup], measured: Sequence[Measured] = ()
    ) -> TickResult:
        """Settle, poll for new events of the closed cursors and open their windows, in one transaction.

        No cursor may be in both ``groups`` and ``measured``.
        """

    async def measure(self, group: CursorGroup) -> Window | None:
        """Return the bounds of a window that is too large for one read; None if every member lost its lease.

        May take minutes. Only the group waits for it.
        """

    async def read(self, window: Window, members: Sequence[Lease], after: int, *, crash_count: int = 0) -> Chunk:
        """Return the next chunk of an open window after the id ``after``, routed to the members.

        ``crash_count`` is the crash count at this position. The higher it is, the smaller the chunk.
        """

    async def parked_keys(self, lease: Lease) -> tuple[set[str], int]:
        """Return the keys with parked events, which nothing may overtake, and the number of all parked events."""

    async def due(self, lease: Lease, limit: int, max_bytes: int) -> tuple[list[Parked], float | None]:
        """Return the due heads of parked keys and the seconds until the next one is due (None if no head waits).

        To bound memory, return one event, or as many as fit into ``max_bytes`` including headers.
        """

    async def queue(self, lease: Lease, key: str, limit: int, max_bytes: int) -> list[Parked]:
        """Return the first parked events of a key in sending order, with the same limits as ``due``."""

    async def enable_wakeups(self) -> None:
        """Enable wake-ups (NOTIFY) from writers before this relay becomes idle."""

    async def disable_wakeups(self) -> None: ...

    async def undecided_writers(self) -> bool:
        """Return True if a transaction of the last ``enable_wakeups`` is open: it may commit without a wake-up."""

    async def close_unused(self) -> None:
        """Close the resources that only an owner of partitions needs. Called when this relay owns none."""

    async def close(self, *, leave: bool) -> None:
        """Close all connections. If ``leave``, deregister first, so that other relays need not wait for expiry."""

    async def backlog(self, subscription: int) -> Backlog:
        """Return the backlog of a subscription, from a bounded probe instead of a full count."""
