"""Leases in Postgres: one heartbeat row per relay, an owner and an epoch per cursor, one advisory lock per relay.

Clocks: a relay measures the silence of its peers by its own monotonic clock (`Heartbeats`), from the moment it read
their last heartbeat, because a database's clock may be set and a failover brings another one. It measures its *own*
lease from before the heartbeat was sent, so it gives up its leases before its peers take over. Safety does not depend
on clocks: every write checks the epoch.

A relay with a row in ``mailboat.relays`` counts as alive. Failure cases:
- Relay killed: its session ends and its advisory lock is free. After a short silence another relay expires it
  (`expire`: deletes its row) and claims its cursors (``claim`` increments the crash count).
- Relay hung, or cut off while its session stays open: it expires after the TTL of its lease. Its later settlements
  fail on the epoch, and its next heartbeat raises ``LeaseLost``. A relay that still runs has ended its session and its
  calls to sinks before (``Timings.trusted``). Its peers report it as silent at once and count its partitions' lag.
- Pooler in between: no session lock can be held, so only the lease TTL counts.
- Relay's lock held by another session, as any database user can do: the same, with a warning that names the session.
- Database restart: all locks are free for a moment and heartbeats are old. A relay measures silence only from its own
  first read, so peers that reconnect at the same time are not expired.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from mailboat.errors import LeaseLost
from mailboat.store.connection import PostgresConnection, first_row
from mailboat.store.outbox_store import (
    Cursor,
    CursorKey,
    Lease,
    Membership,
    PartitionOwner,
    RelayPeer,
    Subscription,
    Window,
)
from mailboat.store.settings import RelayIdentity, StoreSettings
from mailboat.store.sql import statements

log = logging.getLogger(__name__)

_SQL = statements("leases")
_SYNC = statements("windows")["sync"]
_LOCK_TRIES = 20
_LOCK_PAUSE = 0.05
"""Seconds between two tries."""


def lock_key(relay: str) -> dict[str, int]:
    """Return the advisory lock key of a relay: the md5 of its id as two signed 32-bit integers."""
    digest = hashlib.md5(f"mailboat relay {relay}".encode(), usedforsecurity=False).digest()
    return {"high": int.from_bytes(digest[:4], signed=True), "low": int.from_bytes(digest[4:8], signed=True)}


class Heartbeat(NamedTuple):
    """Last heartbeat of one process. Every new heartbeat differs from the previous one."""

    incarnation: str
    at: str
    """The database's time, as text. It may be set, or be another server's, so it is only compared for equality."""


class Heartbeats:
    """Heartbeats of all relays, as read by this relay.

    Silence before the first read does not count, because the database itself may have been unreachable.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Heartbeat, float]] = {}

    def silences(self, latest: Mapping[str, Heartbeat], sent_at: float, answered_at: float) -> dict[str, float]:
        """Return the seconds without a change for each relay, from the arrival of a result to the sending of a query.

        A late result, or one that waited in a suspended process, therefore never makes a relay appear silent.
        """
        self._seen = {
            relay: seen if (seen := self._seen.get(relay)) and seen[0] == heartbeat else (heartbeat, answered_at)
            for relay, heartbeat in latest.items()
        }
        return {relay: max(0.0, sent_at - since) for relay, (_, since) in self._seen.items()}


class Leases:
    def __init__(self, me: RelayIdentity, settings: StoreSettings) -> None:
        self._me = me
        self._settings = settings
        self._heartbeats = Heartbeats()
        self._identity: dict[str, object] = {
            "relay": me.id,
            "incarnation": me.incarnation,
            "outbox": settings.layout.table,
            "ttl": settings.lease_ttl,
        }
        self._epochs: dict[CursorKey, str] = {}
        """Epochs of all owned cursors of delivered subscriptions, as far as this relay knows."""

    async def join(self, link: PostgresConnection, serves: Collection[int]) -> None:
        """Register this relay. Raise ``LeaseLost`` if its id is in use."""
        session_lock = not link.server.pooled and await self._take_liveness_lock(link)
        async with link.transaction() as cursor:
            await cursor.execute(_SQL["inherit"], self._identity)
            await cursor.execute(_SQL["release_unserved"], {**self._identity, "serves": list(serves)})
            about = {"address": self._me.address, "serves": list(serves), "session_lock": session_lock}
            await cursor.execute(_SQL["join"], self._identity | about)

    async def _take_liveness_lock(self, link: PostgresConnection) -> bool:
        """Try to acquire the liveness lock for about a second: this relay's previous session may still be ending, or a
        peer may be expiring it. Return False if a session that is no relay of this name holds it."""
        key = lock_key(self._me.id)
        for _ in range(_LOCK_TRIES):
            if await link.fetch(_SQL["lock"], key) == [(True,)]:
                return True
            await asyncio.sleep(_LOCK_PAUSE)
        ((holder, in_use),) = await link.fetch(_SQL["lock_holder"], self._identity | key)
        if in_use:
            raise LeaseLost(
                f"another process runs as relay {self._me.id!r} on this database. Stop it, or give this one another"
                f" name with --relay-id. (Its liveness lock is held by {holder}.)"
            )
        log.warning(
            "Liveness lock is held by another session; takeovers from this relay wait for its leases to expire.",
            extra={"relay": self._me.id, "holder": holder},
        )
        return False

    async def beat(self, link: PostgresConnection, serves: Collection[int], delivered: Collection[int]) -> Membership:
        """Renew all leases with one statement, expire dead relays, and return the state of ownership.

        ``delivered``: the subscriptions among ``serves`` whose partitions relays own.
        """
        overdue_after = self._settings.overdue_after
        where = {"serves": list(serves), "delivered": list(delivered), "epochs": list(self._epochs.values())}
        sent_at = time.monotonic()
        async with link.autocommit() as cursor:
            found = await first_row(cursor, _SQL["beat"], self._identity | where)
            if found is None:
                raise LeaseLost(f"relay {self._me.id!r} was declared dead or replaced by another process of that name")
            relays, owners, subscriptions, due, found_by_epoch = (column or () for column in found)
            latest = {relay: Heartbeat(incarnation, beat_at) for relay, incarnation, beat_at, *_ in relays}
            silences = self._heartbeats.silences(latest, sent_at, time.monotonic())
            peers: list[RelayPeer] = []
            for relay, _, _, ttl, served, session_lock in relays:
                if relay == self._me.id:
                    peers.append(RelayPeer(relay, frozenset(serves), alive=True))
                    continue
                silence, alive = silences[relay], True
                if silence > ttl or (session_lock and silence > overdue_after):
                    about = {"relay": relay, **latest[relay]._asdict(), "expired": silence > ttl, **lock_key(relay)}
                    alive = await first_row(cursor, _SQL["expire"], about) is None
                peers.append(RelayPeer(relay, frozenset(served), alive, alive and silence > overdue_after))
        cursors = [
            (CursorKey(number, partition), *rest)
            for number, *columns in owners
            for partition, *rest in zip(*columns, strict=True)
        ]
        holdings = tuple(PartitionOwner(key, owner, assigned_to) for key, owner, assigned_to, _ in cursors)
        if not found_by_epoch:
            self._epochs = {key: epoch for key, _, _, epoch in cursors if epoch is not None}
        states = {row[0]: Subscription(*row) for row in subscriptions}
        return Membership(tuple(peers), holdings, states, frozenset(CursorKey(*key) for key in due))

    async def leave(self, link: PostgresConnection) -> None:
        await link.fetch(_SQL["leave"], self._identity)

    async def claim(self, link: PostgresConnection, keys: Mapping[CursorKey, int]) -> list[Cursor]:
        """Acquire the cursors that no live relay owns, if their generation is the one given by the caller.

        This commit waits for the outbox's durability, because an open window is published without another commit, and
        the relay that opened it may have died before its own commit was that durable.
        """
        wanted = {
            "subscriptions": [k.subscription for k in keys],
            "partitions": [k.partition for k in keys],
            "generations": list(keys.values()),
        }
        return await self._take(link, _SQL["claim"], self._identity | wanted)

    async def renew(self, link: PostgresConnection, leases: Collection[Lease]) -> list[Cursor]:
        return await self._take(link, _SQL["renew"], {"epochs": [lease.epoch for lease in leases]})

    async def _take(self, link: PostgresConnection, statement: str, parameters: Mapping[str, object]) -> list[Cursor]:
        async with link.transaction() as cursor:
            await cursor.execute(_SYNC, {"level": self._settings.sync_level})
            await cursor.execute(statement, parameters)
            rows = await cursor.fetchall()
        cursors = []
        for number, part, epoch, settled_snapshot, window_snapshot, lowest, highest, *progress, previous_layout in rows:
            carry_over = number if previous_layout else 0
            window = Window(settled_snapshot, window_snapshot, lowest, highest, carry_over) if window_snapshot else None
            cursors.append(Cursor(Lease(CursorKey(number, part), epoch), settled_snapshot, window, *progress))
        self._epochs |= {cursor.lease.key: cursor.lease.epoch for cursor in cursors}
        return cursors

    def epochs(self, subscription: int) -> list[str]:
        return [epoch for key, epoch in self._epochs.items() if key.subscription == subscription]

    async def release(self, link: PostgresConnection, leases: Collection[Lease]) -> None:
        await link.fetch(_SQL["release"], {"epochs": [lease.epoch for lease in leases]})

    async def assign(
        self, link: PostgresConnection, subscription: int, generation: int, owners: dict[int, str]
    ) -> bool:
        where = {"subscription": subscription, "generation": generation}
        if not await link.fetch(_SQL["accept"], where):
            return False
        for partition, relay in sorted(owners.items()):
            await link.fetch(_SQL["assign"], {**where, "partition": partition, "relay": relay})
        return True

    async def request_wakeup(self, link: PostgresConnection, active: bool) -> None:
        await link.fetch(_SQL["request_wakeup"], {**self._identity, "active": active})
