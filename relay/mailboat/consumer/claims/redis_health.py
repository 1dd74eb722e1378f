"""Checks whether Redis can be relied on to remember: eviction policy, lost memory, replicas; and a memory forecast.

A problem has a message with its effect on events and the remedy. The checks read ``INFO`` and one marker key per
consumer. The first check writes the marker. If a later check finds no marker or another one, Redis has lost keys. The
new marker contains the time of the loss, so all instances report it. The report ends after one time to live, when the
lost keys would have expired.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from redis.exceptions import NoPermissionError

EVICTS_KEYS: Final = "EvictsKeys"
MEMORY_LOST: Final = "MemoryLost"
NOT_REPLICATED: Final = "NotReplicated"
BYTES_PER_EVENT: Final = 200
"""Memory of one remembered event: 150 to 240 were measured, depending on the server and on its hash tables."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason not to rely on the store."""

    reason: str
    """EvictsKeys, MemoryLost or NotReplicated."""
    message: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Facts:
    """Results of the checks. For a cluster, the worst result of its servers."""

    policy: str = "noeviction"
    maxmemory: int = 0
    replicas: int | None = None
    memory_lost: datetime | None = None


def problems(facts: Facts, min_replicas: int, now: datetime, earlier: Iterable[Problem] = ()) -> tuple[Problem, ...]:
    """Return the problems. A problem of an earlier check keeps its time."""
    found: dict[str, str] = {}
    if facts.maxmemory and facts.policy != "noeviction":
        found[EVICTS_KEYS] = (
            f"maxmemory-policy is {facts.policy}: a full Redis forgets events, and they may be handled again. Set it to"
            " noeviction, and maxmemory high enough."
        )
    if facts.memory_lost is not None:
        found[MEMORY_LOST] = (
            f"Redis lost keys at about {facts.memory_lost:%Y-%m-%d %H:%M:%S} UTC: events that are delivered again are"
            " handled again. Switch persistence on (appendonly), and find the cause: FLUSHALL, restart or eviction."
        )
    if facts.replicas is not None and facts.replicas < min_replicas:
        found[NOT_REPLICATED] = (
            f"{facts.replicas} of {min_replicas} replicas confirm writes: a failover may forget events, and they may"
            " be handled again."
        )
    since = {problem.reason: problem.since for problem in earlier}
    since[MEMORY_LOST] = facts.memory_lost or now
    return tuple(Problem(reason, message, since.get(reason, now)) for reason, message in found.items())


def forecast(ttl: float, maxmemory: int) -> str:
    """Return a sentence on the memory that a rate of events needs."""
    per_rate = BYTES_PER_EVENT * ttl
    text = (
        f"each event is remembered for {ttl / 3600:g} h in about {BYTES_PER_EVENT} bytes: {_size(per_rate)} for"
        f" 1 event/s, {_size(per_rate * 100)} for 100 events/s"
    )
    if maxmemory:
        text += f"; maxmemory of {_size(maxmemory)} suffices for {maxmemory / per_rate:.3g} events/s"
    return text


def _size(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


class Marker:
    """The marker key of one consumer. All methods run in the renewal's thread."""

    def __init__(self, key: str, ttl: int) -> None:
        self._key = key
        self._ttl = ttl
        self._written: str | None = None

    def check(self, client: Any) -> datetime | None:
        """Return the time at which Redis lost keys; None if it did not."""
        now = int(client.time()[0])
        value = client.get(self._key)
        if value is None:
            lost = now if self._written is not None else 0
            client.set(self._key, f"{now}|{lost}", nx=True, ex=self._ttl)  # another instance may be faster
            value = client.get(self._key) or f"{now}|{lost}"
        else:
            client.expire(self._key, self._ttl)
        written, _, lost_at = value.partition("|")
        lost = int(lost_at) if lost_at.isdigit() else 0
        if self._written not in (None, written) and not lost:  # written by an instance that started after the loss
            lost = now
            client.set(self._key, f"{written}|{lost}", ex=self._ttl)
        self._written = written
        return datetime.fromtimestamp(lost, UTC) if lost and now - lost < self._ttl else None


def read_facts(client: Any, *, cluster: bool, memory_lost: datetime | None) -> Facts:
    """Read the facts of one server, or of all primaries of a cluster. Rights that are missing leave facts out."""
    memory, replication = (_infos(client, section, cluster) for section in ("memory", "replication"))
    evicting = [each for each in memory if each.get("maxmemory_policy", "noeviction") != "noeviction"]
    worst = (evicting or memory or [{}])[0]
    replicas = [int(each["connected_slaves"]) for each in replication if "connected_slaves" in each]
    return Facts(
        policy=str(worst.get("maxmemory_policy", "noeviction")),
        maxmemory=int(worst.get("maxmemory", 0)),
        replicas=min(replicas, default=None),
        memory_lost=memory_lost,
    )


def _infos(client: Any, section: str, cluster: bool) -> list[Mapping[str, Any]]:
    try:
        found = client.info(section, target_nodes=client.PRIMARIES) if cluster else client.info(section)
    except NoPermissionError:
        return []
    return list(found.values()) if cluster and not any(isinstance(v, str | int) for v in found.values()) else [found]
