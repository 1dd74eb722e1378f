"""Claims in Redis or Valkey: one key per event and consumer, with the lease in the value.

Key ``<prefix>:<consumer>:<event id>``, always with the whole time to live. Values:

| value | state |
|---|---|
| ``p|owner|until|attempt[|deaths]`` | processing: ``owner`` has the event until ``until`` (ms of Redis' clock) |
| ``f||due|attempts[|deaths]`` | failed: the next attempt may begin at ``due`` |
| ``d`` | done |
| ``x`` | dead: the dead letter is stored |
| anything else | done, by an older helper |

``deaths`` counts the attempts whose consumer died; absent means none. An owner is ``instance:incarnation``. A claim by
its own owner has the same attempt: the reply to the first was lost. A later incarnation of the same instance takes over
at once, because a restarted container has no other process. The scripts are beside this file.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from mailboat.consumer.broker.interfaces import (
    Busy,
    Claim,
    Claimed,
    ClaimReply,
    ClaimsUnavailable,
    FailedAttempt,
    Finished,
)
from mailboat.consumer.claims.owner import DEFAULT_LEASE, DEFAULT_TTL, owner_of
from mailboat.consumer.claims.redis_connections import RedisConnections, check_certificates, clients_of, parse_address
from mailboat.consumer.claims.redis_health import Facts, Marker, Problem, forecast, problems, read_facts
from mailboat.consumer.claims.renewal import Renewal
from mailboat.consumer.claims.scripts import ERRORS, Replication, ScriptCall, ScriptReplies, arun, run, unavailable
from mailboat.errors import ConfigError

log = logging.getLogger(__name__)

_NEW: Final = "m1:0"
_FIRST: Final[ClaimReply] = Claimed(1)
_MOST_UNSETTLED: Final = 100_000


def reply_of(text: str) -> ClaimReply:
    """Return what an answer of ``claim.lua`` means."""
    if text == _NEW:
        return _FIRST
    if text[0] == "m":
        attempt, _, deaths = text[1:].partition(":")
        return Claimed(int(attempt), int(deaths))
    if text[0] == "w":
        return Busy(int(text[1:]) / 1000)
    return Finished(dead=text == "x")


class RedisClaims:
    """A ClaimStore in Redis. While an event is claimed by this store, a second claim of it answers Busy."""

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        prefix: str = "mailboat",
        ttl: float = DEFAULT_TTL,
        lease: float = DEFAULT_LEASE,
        instance: str | None = None,
        life: str | None = None,
        ca_pem: str | None = None,
        timeout: float = 5.0,
        replicas: int = 0,
        check_every: float = 60.0,
    ) -> None:
        """``ca_pem``: CA certificates; None for those of the system. ``instance``: name that a restarted container has
        again and no other process has, such as the pod's name; None for a unique one. ``replicas``: wait up to 100 ms
        for so many replicas after each call."""
        if not prefix or not consumer or lease <= 0 or ttl < lease:
            raise ConfigError("claims need a prefix, a consumer, and a ttl that is longer than the lease")
        address = parse_address(url)
        if ca_pem is not None:
            check_certificates(ca_pem, tls=address.tls)
        if replicas and address.is_cluster:
            raise ConfigError("replicas can't be waited for on a cluster: set min-replicas-to-write on its nodes")
        self.owner = owner_of(instance, life)
        self._connections = RedisConnections(address, ca_pem, timeout)
        self._cluster = address.is_cluster
        self._replication = Replication(replicas)
        self._prefix = f"{prefix}:{consumer}:"
        self._ttl = max(1, round(ttl))
        self._lease = lease
        self._lease_ms = max(1, round(lease * 1000))
        self._client: Any = None
        self._thread_client: Any = None
        self._marker = Marker(f"{self._prefix}marker", self._ttl)
        self._problems: tuple[Problem, ...] = ()
        self._facts: Facts | None = None
        self._unreplicated = False
        self._unsettled: dict[str, None] = {}
        self._renewal = Renewal(self._renew, lease=lease, check=self._check, check_every=check_every)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Reasons not to rely on this store, as of the last check."""
        return self._problems

    async def open(self) -> None:
        """Start the renewals. A server that is unavailable now is used as soon as it is there."""
        self._client = self._connections.asynchronous()
        self._renewal.start()
        try:
            await asyncio.to_thread(self._check)
        except ClaimsUnavailable as error:
            log.warning("Claim store unavailable", extra={"error": str(error)})

    async def close(self) -> None:
        await asyncio.to_thread(self._renewal.stop)
        for client in clients_of(self._thread_client) if self._thread_client is not None else ():
            await asyncio.to_thread(client.close)
        for client in clients_of(self._client) if self._client is not None else ():
            await client.aclose()

    async def claim(self, claims: Sequence[Claim]) -> list[ClaimReply]:
        held = self._renewal.among([claim.event_id for claim in claims])
        pending = [claim for claim in claims if claim.event_id not in held] if held else claims
        event_ids = [claim.event_id for claim in pending]
        replays = [("1" if claim.replay else "0",) for claim in pending] if any(each.replay for each in pending) else ()
        texts = await self._run(self._call("claim", event_ids, (self._lease_ms, self._ttl), replays))
        replies = [_FIRST if text == _NEW else reply_of(text) for text in texts]
        self._renewal.hold([id_ for id_, found in zip(event_ids, replies, strict=True) if isinstance(found, Claimed)])
        if not held:
            return replies
        found = dict(zip(event_ids, replies, strict=True))
        return [found.get(claim.event_id, Busy(self._lease / 3)) for claim in claims]

    async def done(self, event_ids: Sequence[str]) -> list[bool]:
        return await self._settle(event_ids, self._call("finish", event_ids, (self._ttl, "d")))

    async def dead(self, event_ids: Sequence[str]) -> list[bool]:
        return await self._settle(event_ids, self._call("finish", event_ids, (self._ttl, "x")))

    async def fail(self, failures: Sequence[FailedAttempt]) -> list[bool]:
        event_ids = [failure.event_id for failure in failures]
        each = [
            (round(min(max(failure.retry_in, 0.0), self._ttl) * 1000), "1" if failure.counted else "0")
            for failure in failures
        ]
        return await self._settle(event_ids, self._call("fail", event_ids, (self._ttl,), each))

    async def release(self, event_ids: Sequence[str]) -> None:
        await self.fail([FailedAttempt(event_id, 0.0, counted=False) for event_id in event_ids])

    async def _settle(self, event_ids: Sequence[str], call: ScriptCall) -> list[bool]:
        """Write results. If that fails, the caller may repeat it: the scripts recognise results of the first call."""
        self._renewal.drop(event_ids)
        repeated = bool(self._unsettled) and any(event_id in self._unsettled for event_id in event_ids)
        try:
            replies = await self._run(replace(call, repeated=repeated))
        except ClaimsUnavailable:
            self._unsettled.update(dict.fromkeys(event_ids))
            while len(self._unsettled) > _MOST_UNSETTLED:
                del self._unsettled[next(iter(self._unsettled))]
            raise
        if repeated:
            for event_id in event_ids:
                self._unsettled.pop(event_id, None)
        return [reply == "1" for reply in replies]

    def _call(
        self,
        name: str,
        event_ids: Sequence[str],
        common: tuple[str | int, ...],
        each: Sequence[tuple[str | int, ...]] = (),
    ) -> ScriptCall:
        # Bytes: redis-py passes them on, and looks for the type of everything else.
        return ScriptCall(
            name, [(self._prefix + event_id).encode() for event_id in event_ids], self.owner, common, each
        )

    async def _run(self, call: ScriptCall) -> ScriptReplies:
        if not call.keys:
            return ScriptReplies()
        try:
            replies = await arun(self._client, call, cluster=self._cluster, replication=self._replication)
        except ERRORS as error:
            raise unavailable(error, self._connections.address) from error
        if replies.replicated == self._unreplicated:
            self._unreplicated = not replies.replicated
            self._report()
        return replies

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _renew(self, event_ids: Sequence[str]) -> list[str]:
        """Renew leases and return the ids of lost claims. Claims that Redis forgot are made again."""
        replies = self._run_in_thread(self._call("renew", event_ids, (self._lease_ms, self._ttl)))
        lost = [event_id for event_id, reply in zip(event_ids, replies, strict=True) if reply == "0"]
        forgotten = [
            event_id
            for event_id, reply in zip(event_ids, replies, strict=True)
            if reply == "-1" and self._renewal.holds(event_id)
        ]
        return lost + (self._restore(forgotten) if forgotten else [])

    def _restore(self, event_ids: Sequence[str]) -> list[str]:
        replies = self._run_in_thread(self._call("claim", event_ids, (self._lease_ms, self._ttl)))
        claimed = {event_id for event_id, text in zip(event_ids, replies, strict=True) if text[0] == "m"}
        settled = [event_id for event_id in claimed if not self._renewal.holds(event_id)]
        if settled:  # settled in the meantime: the claim must not stay behind
            self._run_in_thread(self._call("fail", settled, (self._ttl,), [(0, "0")] * len(settled)))
        return [event_id for event_id in event_ids if event_id not in claimed]

    def _check(self) -> None:
        try:
            client = self._synchronous()
            lost = self._marker.check(client)
            facts = read_facts(client, cluster=self._cluster, memory_lost=lost)
        except ERRORS as error:
            raise unavailable(error, self._connections.address) from error
        if self._facts is None:
            log.info(
                "Claims in Redis: %s",
                forecast(self._ttl, facts.maxmemory),
                extra={"redis": str(self._connections.address)},
            )
        self._facts = facts
        self._report()

    def _report(self) -> None:
        """Work out the problems, and log new and solved ones."""
        facts = self._facts or Facts()
        if self._unreplicated:
            facts = replace(facts, replicas=min(facts.replicas or 0, self._replication.replicas - 1))
        earlier = {problem.reason for problem in self._problems}
        self._problems = problems(facts, self._replication.replicas, datetime.now(UTC), self._problems)
        for problem in self._problems:
            if problem.reason not in earlier:
                log.warning("Claims are not reliable: %s", problem.message, extra={"reason": problem.reason})
        for solved in sorted(earlier - {problem.reason for problem in self._problems}):
            log.info("Claims are reliable again", extra={"reason": solved})

    def _synchronous(self) -> Any:
        if self._thread_client is None:
            self._thread_client = self._connections.synchronous()
        return self._thread_client

    def _run_in_thread(self, call: ScriptCall) -> ScriptReplies:
        try:
            return run(self._synchronous(), call, cluster=self._cluster)
        except ERRORS as error:
            raise unavailable(error, self._connections.address) from error
