"""Leader election: one of several operators reconciles, and a Lease names it.

Every operator polls the Lease every few seconds. If the Lease is free, a candidate writes its own name, conditional on
the version read, so that only one of several succeeds. The leader renews the Lease before it expires.

- Clocks of different machines are never compared. A Lease is free if it has not *changed* for its whole duration, by
  the monotonic clock of the observing candidate.
- The leader gives up (``renew_within``) well before other candidates take over (``duration``), whether the API server
  refuses, hangs or is unavailable: a renewal that takes too long is abandoned. Then the process ends; leadership is not
  reacquired.
- A leader that shuts down gracefully releases the Lease, and the next one acquires it at its next poll.
- Identities are unique per process: two processes with the same configured name must not both be leader.

Not ``kubernetes.aio.leaderelection``, as of release 37: its deadline is checked only between calls, so a hanging call
keeps a leader in office indefinitely; a refused connection escapes it and leaves the leader's task running; it uses the
wall clock, writes local time as UTC, and never releases a Lease.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from mailboat_operator.kube.client import LEASE, Kind, Kube, Object
from mailboat_operator.kube.errors import Conflict, KubeError, NotFound

log = logging.getLogger(__name__)

_RELEASE_WITHIN: Final = 3.0
_POLL_WITHIN: Final = 5.0


class LeadershipLost(Exception):
    """Another operator leads, or may lead by now. The process must end."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds. In the gap between ``renew_within`` and ``duration`` a former leader must end."""

    duration: int
    renew_within: float
    retry_period: float

    @classmethod
    def of(cls, duration: float) -> Self:
        """Derive all durations in the usual proportions."""
        return cls(max(1, math.ceil(duration)), duration * 2 / 3, duration / 7.5)


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """Last observed state of the Lease, and the time of its last change."""

    version: str
    holder: str
    duration: float
    since: float

    def is_free(self, now: float) -> bool:
        return not self.holder or now >= self.since + self.duration


def observe(lease: Object, before: ObservedLease | None, now: float, default_duration: float) -> ObservedLease:
    """Return the observed Lease after another poll. Pure: an unchanged Lease keeps its time."""
    version = str(lease["metadata"]["resourceVersion"])
    if before is not None and before.version == version:
        return before
    spec = lease.get("spec") or {}
    duration = float(spec.get("leaseDurationSeconds") or default_duration)
    return ObservedLease(version, str(spec.get("holderIdentity") or ""), duration, now)


class Election:
    """One candidate. ``acquire``, then ``hold`` while working, then ``release``."""

    def __init__(self, kube: Kube, namespace: str, name: str, identity: str, timing: Timing) -> None:
        self.identity = identity
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._lease = f"{namespace}/{name}"
        self._timing = timing
        self._observed: ObservedLease | None = None
        self._held: Object | None = None
        self._renewed = 0.0
        self._last_error = ""

    @property
    def time_left(self) -> float:
        """Seconds until another candidate can lead, counted from the last renewal."""
        return max(0.0, self._renewed + self._timing.duration - time.monotonic())

    async def acquire(self) -> None:
        """Return once this process leads. Retry while the API server is unavailable."""
        while True:
            try:
                async with asyncio.timeout(_POLL_WITHIN):
                    if await self._try_acquire():
                        break
                self._last_error = ""
            except (KubeError, TimeoutError) as error:
                self._log_error(error)
            # With jitter: candidates that start together would collide at every poll.
            await asyncio.sleep(self._timing.retry_period * random.uniform(0.8, 1.2))
        log.info("Acquired leader lease", extra={"lease": self._lease, "identity": self.identity})

    async def hold(self) -> None:
        """Renew periodically. Never returns; raises ``LeadershipLost``."""
        while True:
            await asyncio.sleep(self._timing.retry_period)
            until = self._renewed + self._timing.renew_within
            started = time.monotonic()
            # Half of the time per attempt: if a connection hangs, there is time for a new one.
            timeout = min(until - started, self._timing.renew_within / 2)
            try:
                async with asyncio.timeout(max(timeout, 0.001)):
                    await self._renew()
                self._renewed = started
                self._last_error = ""
            except (KubeError, TimeoutError) as error:
                self._log_error(error)
                if time.monotonic() >= until:
                    self._held = None
                    within, reason = self._timing.renew_within, error or "no answer"
                    lost = f"the Lease {self._lease} could not be renewed for {within:g} s: {reason}"
                    raise LeadershipLost(lost) from error

    async def release(self) -> None:
        """Release the Lease, if it is held, so that the next leader need not wait. Never fails."""
        if self._held is None:
            return
        try:
            async with asyncio.timeout(_RELEASE_WITHIN):
                await self._renew(holderIdentity=None, leaseDurationSeconds=1)
            log.info("Leader lease released", extra={"lease": self._lease})
        except (KubeError, TimeoutError) as error:
            log.warning("Leader lease not released, it expires", extra={"error": str(error)})
        except LeadershipLost:
            pass  # another operator leads
        self._held = None

    async def _try_acquire(self) -> bool:
        started = time.monotonic()
        write: Callable[[Kind, Object], Awaitable[Object]] = self._kube.replace
        try:
            lease = await self._kube.get(LEASE, self._namespace, self._name)
        except NotFound:
            metadata = {"name": self._name, "namespace": self._namespace}
            lease = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata}
            write, transitions = self._kube.create, 0
        else:
            if not self._is_available(lease):
                return False
            transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0) + 1
        now = _now()
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._timing.duration,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        try:
            self._held = await write(LEASE, {**lease, "spec": spec})
        except Conflict:
            return False  # another candidate was faster
        self._renewed = started
        return True

    def _is_available(self, lease: Object) -> bool:
        before = self._observed
        self._observed = observe(lease, before, time.monotonic(), self._timing.duration)
        if before is None or before.holder != self._observed.holder:
            log.info("Leader lease held by another operator", extra={"holder": self._observed.holder or "none"})
        # The Lease names this process if the response to its write was lost: identities are unique.
        return self._observed.holder == self.identity or self._observed.is_free(time.monotonic())

    async def _renew(self, **changes: object) -> None:
        """Update the held Lease. Raises ``LeadershipLost`` if it is not held any more."""
        assert self._held is not None, "renewed after it was acquired"
        try:
            self._held = await self._update(self._held, changes)
        except (Conflict, NotFound):
            # The response to an earlier write was lost, a person edited the Lease, or another operator leads.
            self._held = await self._update(await self._own_lease(), changes)

    async def _update(self, lease: Object, changes: Mapping[str, object]) -> Object:
        return await self._kube.replace(LEASE, {**lease, "spec": {**lease["spec"], **changes, "renewTime": _now()}})

    async def _own_lease(self) -> Object:
        try:
            lease = await self._kube.get(LEASE, self._namespace, self._name)
            holder = (lease.get("spec") or {}).get("holderIdentity")
            if holder == self.identity:
                return lease
            lost = f"{holder or 'no operator'} holds the Lease {self._lease} now"
        except NotFound:
            lost = f"the Lease {self._lease} was deleted"
        self._held = None
        raise LeadershipLost(lost)

    def _log_error(self, error: BaseException) -> None:
        """Log an error once, not at every poll."""
        text = str(error) or "no answer from the API server"
        if text != self._last_error:
            log.warning("Leader lease request failed, retrying", extra={"error": text})
        self._last_error = text


def _now() -> str:
    """Current time for people and other programs; no decision of the operator uses it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
