"""What the pump asks of an outbox: the protocol, and the values that cross it.

The words are those of ``docs/windows.md``. A cursor is the progress of one partition of one subscription. It is
*closed* when everything visible in its snapshot ``done`` is settled, and *open* while the window (``done``, ``upto``]
is being worked on; ``position`` is the id up to which the window is settled. Snapshots are opaque text here: only a
store can compare them with events.

Two rules make crashes and failovers harmless, and every store must keep them:

- A window is written down (and made as durable as the outbox promises) before its first event is handed out by
  ``tick``.
- Whatever changes progress names the epoch *and* the window it believes in; where either is no longer what is
  stored, the change does not happen and the cursor comes back as lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mailboat.events import Event


class CursorKey(NamedTuple):
    """Which cursor: a partition of a subscription (by its number in the store)."""

    subscription: int
    partition: int


class Lease(NamedTuple):
    """The right to move one partition: valid as long as the store holds the same epoch."""

    key: CursorKey
    epoch: str


@dataclass(frozen=True, slots=True)
class Window:
    """The events that became visible between two snapshots.

    ``lowest`` is where the walk over a large window begins (a few late events may lie before it); None for a window
    of at most one read.
    """

    done: str
    upto: str
    lowest: int | None = None
    highest: int | None = None
    indebted: int = 0
    """The subscription whose cursors of an earlier layout left something to finish (see ``repartition``); 0: none did.
    What they left is its own, so nobody else shares the window, even one with the same snapshots."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A cursor as it was when its lease was taken."""

    lease: Lease
    done: str
    window: Window | None
    position: int
    sequence: int
    resumes: int
    """How often a relay died at this very position; without a window: whether one did, which may have been reading."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a store needs to know of a subscription to route events to it."""

    number: int
    name: str
    partitions: int
    generation: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of a parked or dead event."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Park:
    """Park an event: as the failed head of its key (``failure`` given) or behind it."""

    event: Event
    sequence: int
    attempts: int = 0
    retry_in: float | None = None
    """Seconds until the next attempt; None: waits behind its key's head, or blocked."""
    failure: Failure | None = None
    blocked: bool = False
    suspect: bool = False
    doomed: bool = False


class Series(NamedTuple):
    """What sequence numbers are numbers of: they are gapless within one."""

    partition: int
    generation: int


@dataclass(frozen=True, slots=True)
class Parked:
    """An event in the parking lot, as read for its next attempt."""

    ordinal: int
    event: Event
    sequence: int
    series: Series
    """That of the partition in which it was first taken, however many there are now."""
    attempts: int
    replay: bool
    suspect: bool
    """Relays died with it in hand: its attempt is counted before it is tried."""
    blocked: bool
    doomed: bool
    """It is given up on; only the dead-letter topic has not taken it yet."""
    failure: Failure | None
    first_failed_at: str | None


@dataclass(frozen=True, slots=True)
class Repark:
    """A parked event failed again (or, a suspect, is about to be tried)."""

    ordinal: int
    attempts: int
    retry_in: float | None
    failure: Failure | None
    blocked: bool = False
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class Dead:
    """An event given up on. ``ordinal`` names the parked row it comes from, if it was parked."""

    event: Event
    sequence: int
    attempts: int
    failure: Failure
    ordinal: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """What happened to a partition's events; applied whole or not at all."""

    lease: Lease
    upto: str | None
    """The window it speaks of; None when it only concerns parked events."""
    position: int = 0
    sequence: int = 0
    closes: bool = False
    """The window is done: ``done`` moves to ``upto``."""
    park: tuple[Park, ...] = ()
    repark: tuple[Repark, ...] = ()
    unpark: tuple[int, ...] = ()
    dead: tuple[Dead, ...] = ()
    ordered: bool = True
    """Of a parked key only the first may be tried; False: parked events are tried each on its own."""
    arrange: frozenset[str] = frozenset()
    """Keys whose parked events were set aside by an earlier owner, who may have kept another order than ``ordered``."""
    awaited: bool = False
    """Nothing more is sent before it is written down."""
    in_hand: bool | None = None
    """Whether events are in hand from now on, so that one of them may be to blame if this relay dies; None: as before.
    A cursor's owner has events in hand from its claim on, unless it says otherwise."""

    @property
    def durable(self) -> bool:
        """Plain progress may be lost in a crash (it costs duplicates); this may not."""
        return bool(self.park or self.repark or self.unpark or self.dead or self.arrange)


@dataclass(frozen=True, slots=True)
class TipGroup:
    """Closed cursors that share one ``done``: their next window is read once for all of them."""

    done: str
    members: tuple[Lease, ...]
    cautious: bool = False
    """A relay died while it may have read for one of them: measure whatever there is before it is read."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A window that is too large for one read, with its bounds: a tick opens it."""

    window: Window
    members: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """A window that was opened for some members of a group. ``events`` is None when it is too large for one read."""

    window: Window
    members: tuple[Lease, ...]
    events: Mapping[CursorKey, Sequence[Event]] | None


@dataclass(frozen=True, slots=True)
class Advanced:
    """Members whose ``done`` moved because nothing up to there was for them."""

    done: str
    members: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class TickResult:
    """What one tick found."""

    lost: frozenset[CursorKey]
    opened: tuple[Opened, ...]
    advanced: tuple[Advanced, ...]
    overflowing: tuple[TipGroup, ...] = ()
    """For them more became visible than one read holds: it has to be measured before it can be opened."""

    @property
    def quiet(self) -> bool:
        """Whether there was nothing new for anybody."""
        return not self.opened and not self.advanced and not self.overflowing


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a window, for all members that share it."""

    events: Mapping[CursorKey, Sequence[Event]]
    reached: int
    """Everything up to this id was looked at."""
    last: bool
    """Nothing of the window lies behind it."""


@dataclass(frozen=True, slots=True)
class RelayPeer:
    """Another relay (or this one) as the store knows it."""

    id: str
    serves: frozenset[int]
    alive: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """Who owns a cursor, and who should."""

    key: CursorKey
    owner: str | None
    assigned_to: str | None


@dataclass(frozen=True, slots=True)
class Roster:
    """The state of ownership at one heartbeat."""

    peers: tuple[RelayPeer, ...]
    holdings: tuple[Holding, ...]
    subscriptions: Mapping[int, Subscription]
    due: frozenset[CursorKey] = frozenset()
    """Partitions with a parked event whose time has come."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far one partition is behind. ``pending`` stops counting at a bound of events, those for others included."""

    pending: int
    oldest_age: float | None
    """Seconds since the oldest pending event was written."""
    bounded: bool = False
    """There are at least so many. At least none, where all that was looked at is for others."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for one subscription, by partition, and what is set aside."""

    partitions: Mapping[int, Lag] = field(default_factory=dict)
    parked: Mapping[int, int] = field(default_factory=dict)
    dead: int = 0
    blocked: int = 0
    """Events that used up their attempts and hold their keys up until a person decides."""


class OutboxStore(Protocol):
    """One outbox, as one relay sees it. Every method may raise ``DatabaseUnavailable``."""

    async def beat(self) -> Roster:
        """Renew all leases of this relay, and say who else is there. Raises ``LeaseLost`` if it was replaced."""
        ...

    def withdraw(self, number: int) -> None:
        """Serve a subscription no longer: nothing of it is owned."""
        ...

    async def rung(self, timeout: float) -> bool:
        """Wait for a writer to ring, at most so many seconds. Whether one did."""
        ...

    async def claim(self, keys: Collection[CursorKey]) -> list[Cursor]:
        """Take those that nobody alive holds. What could not be had is simply not in the answer."""
        ...

    async def release(self, leases: Collection[Lease]) -> None:
        """Let go, so that another relay can take over at once."""
        ...

    async def tick(
        self, settlements: Sequence[Settlement], tips: Sequence[TipGroup], measured: Sequence[Measured] = ()
    ) -> TickResult:
        """In one transaction: settle, then look for new events for the closed cursors and open their windows.

        Nobody is in ``tips`` and in ``measured``.
        """
        ...

    async def measure(self, group: TipGroup) -> Window | None:
        """The bounds of what a tick found to be too much for one read; None: nobody of the group is there any more.

        A backlog of a hundred million events takes its time; nobody but the group waits for it.
        """
        ...

    async def read(self, window: Window, members: Sequence[Lease], after: int, *, deaths: int = 0) -> Chunk:
        """The next stretch of an open window behind the id ``after``, routed to the members.

        ``deaths``: so many relays died at this place, so it should be a short one.
        """
        ...

    async def parked_keys(self, lease: Lease) -> tuple[set[str], int]:
        """The keys that have parked events (to send nothing past them), and the number of all parked events."""
        ...

    async def due(self, lease: Lease, limit: int, max_bytes: int) -> tuple[list[Parked], float | None]:
        """Heads of parked keys whose time has come, and the seconds until the next one's (None: none waits).

        One, or as many as have so many bytes together, headers and all: they must not fill the memory.
        """
        ...

    async def queue(self, lease: Lease, key: str, limit: int, max_bytes: int) -> list[Parked]:
        """The first of a key's parked events, in the order in which they must be sent; as many at a time as above."""
        ...

    async def sleep(self) -> None:
        """Ask writers to ring from now on."""
        ...

    async def awake(self) -> None:
        """Ask writers not to ring any more."""
        ...

    async def undecided_writers(self) -> bool:
        """Whether a transaction that was open at the last ``sleep`` still is: its writer may not have rung."""
        ...

    async def rest(self) -> None:
        """Nothing is owned: let go of what only owners need."""
        ...

    async def close(self, *, leave: bool) -> None:
        """Let go of all connections; ``leave``: in good order, so that nobody waits for this relay."""
        ...

    async def backlog(self, subscription: int) -> Backlog:
        """What waits for a subscription; a bounded probe, never a full count."""
        ...
