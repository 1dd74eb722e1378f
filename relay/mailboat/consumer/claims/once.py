"""``Once``: claims of single events, for applications with a loop of their own (FastStream, Celery, Django commands).

    once = Once(redis, consumer="billing", prefix="pf:evt:processed")

    async with once.claim(event_id) as first:
        if first:
            await charge(order)

``first`` is False if the event is done. At the end of the block the event is done; after an exception it may be claimed
again. While another consumer holds it, or its next attempt is not due, ClaimHeld is raised: do not acknowledge the
event. The keys and values are those of ``RedisClaims``, so both can share them. ``redis`` is a client of redis-py,
synchronous (``with``) or asynchronous (``async with``). Leases are renewed while the block runs: by a thread with a
synchronous client, by a task with an asynchronous one, where a block that blocks the event loop for a whole lease loses
its claim.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

from mailboat.consumer.broker.interfaces import Busy, Claimed
from mailboat.consumer.claims.owner import DEFAULT_LEASE, DEFAULT_TTL, owner_of
from mailboat.errors import MailboatError

log = logging.getLogger(__name__)


class ClaimHeld(MailboatError):
    """Another consumer holds the claim of an event, or its next attempt is not due. Try again after ``seconds``."""

    def __init__(self, event_id: str, seconds: float) -> None:
        super().__init__(f"event {event_id} is claimed, or not due: try again in {seconds:.1f} s, don't acknowledge it")
        self.seconds = seconds


class Once:
    """Claims of one consumer in Redis or Valkey."""

    def __init__(
        self,
        redis: Any,
        *,
        consumer: str,
        prefix: str = "mailboat",
        ttl: float = DEFAULT_TTL,
        lease: float = DEFAULT_LEASE,
        retry_in: float = 0.0,
        instance: str | None = None,
    ) -> None:
        """``retry_in``: seconds until a failed event may be claimed again. The others are those of RedisClaims."""
        self._redis = redis
        self._prefix = f"{prefix}:{consumer}:"
        self._ttl = max(1, round(ttl))
        self._lease = lease
        self._retry_in = retry_in
        self._instance = instance

    def claim(self, event_id: object) -> OnceClaim:
        """Return the claim of an event, to be used in one ``with`` or ``async with`` statement."""
        return OnceClaim(self, str(event_id))


class OnceClaim:
    """One event. ``attempt`` counts from 1, and includes attempts whose process died."""

    def __init__(self, once: Once, event_id: str) -> None:
        self.event_id = event_id
        self.attempt = 0
        self._once = once
        self._owner = owner_of(once._instance)
        self._stop = threading.Event()
        self._renewing: Any = None

    # -- with --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> bool:
        if self._begun(self._run(self._claim_call())):
            self._renewing = threading.Thread(target=self._renew_in_thread, name="mailboat-once", daemon=True)
            self._renewing.start()
        return self.attempt > 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.attempt:
            self._stop.set()
            self._renewing.join()
            self._ended(self._run(self._result_call(error)))

    def _run(self, call: Any) -> Any:
        from mailboat.consumer.claims.scripts import ERRORS, run, unavailable

        try:
            return run(self._once._redis, call, cluster=_is_cluster(self._once._redis))[0]
        except ERRORS as error:
            raise unavailable(error, "the given client") from error

    def _renew_in_thread(self) -> None:
        while not self._stop.wait(self._once._lease / 3):
            try:
                self._run(self._renew_call())
            except MailboatError as error:
                log.warning("The lease of an event can't be renewed", extra={"error": str(error)})

    # -- async with --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> bool:
        if self._begun(await self._arun(self._claim_call())):
            self._renewing = asyncio.create_task(self._renew())
        return self.attempt > 0

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.attempt:
            self._renewing.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewing
            self._ended(await self._arun(self._result_call(error)))

    async def _arun(self, call: Any) -> Any:
        from mailboat.consumer.claims.scripts import ERRORS, arun, unavailable

        try:
            return (await arun(self._once._redis, call, cluster=_is_cluster(self._once._redis)))[0]
        except ERRORS as error:
            raise unavailable(error, "the given client") from error

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._once._lease / 3)
            try:
                await self._arun(self._renew_call())
            except MailboatError as error:
                log.warning("The lease of an event can't be renewed", extra={"error": str(error)})

    # -- both --------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: str | int) -> Any:
        from mailboat.consumer.claims.scripts import ScriptCall

        return ScriptCall(name, [self._once._prefix + self.event_id], self._owner, arguments)

    def _claim_call(self) -> Any:
        return self._call("claim", round(self._once._lease * 1000), self._once._ttl)

    def _renew_call(self) -> Any:
        return self._call("renew", round(self._once._lease * 1000), self._once._ttl)

    def _result_call(self, error: BaseException | None) -> Any:
        """Done; failed after an exception; given back if the block was interrupted (cancelled, SystemExit)."""
        if error is None:
            return self._call("finish", self._once._ttl, "d")
        if isinstance(error, Exception):
            return self._call("fail", self._once._ttl, round(self._once._retry_in * 1000), "1")
        return self._call("fail", self._once._ttl, 0, "0")

    def _begun(self, text: str) -> bool:
        from mailboat.consumer.claims.redis_store import reply_of

        reply = reply_of(text)
        if isinstance(reply, Busy):
            raise ClaimHeld(self.event_id, reply.seconds)
        if isinstance(reply, Claimed):
            self.attempt = reply.attempt
        return self.attempt > 0

    def _ended(self, kept: str) -> None:
        if kept != "1":
            log.warning("Claim lost to another consumer before its end", extra={"event": self.event_id})


def _is_cluster(client: Any) -> bool:
    return type(client).__name__ == "RedisCluster"
