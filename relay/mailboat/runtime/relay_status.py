"""Status of a relay and of its subscriptions, from memory, with the lag that the session queried beforehand.

The types add values for the metrics to the wire model (``mailboat_spec.relay_status``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from mailboat.delivery.counters import DeliveryHistograms, Totals
from mailboat.delivery.partition_worker import PartitionWorker
from mailboat.runtime.session import RelaySession
from mailboat.runtime.subscription_set import SubscriptionSet
from mailboat.store.examination import Coverage
from mailboat.store.outbox_store import Backlog, Lag
from mailboat_spec import EventSubscription, full_name, relay_status
from mailboat_spec.relay_status import PartitionStatus

STALLED_AFTER = 90.0
"""Seconds without progress of the committer after which only a restart helps. Every wait of the committer ends sooner:
idle waits after ``ACTIVE_EVERY``, database queries with the statement deadline."""


class RelayState(StrEnum):
    CONNECTING = "Connecting"
    RUNNING = "Running"
    FAILED = "Failed"
    STOPPING = "Stopping"


@dataclass(frozen=True, slots=True)
class SubscriptionStatus(relay_status.SubscriptionStatus):
    meters: DeliveryHistograms | None = field(default=None, metadata={"wire": False})


@dataclass(frozen=True)
class RelayStatus(relay_status.RelayStatus):
    subscriptions: tuple[SubscriptionStatus, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    """Events that no filter matches, and filters that match no event. The same in all relays of an outbox."""


@dataclass(frozen=True, slots=True)
class ProcessStatus(relay_status.ProcessStatus):
    relays: tuple[RelayStatus, ...] = ()


def stalled(session: RelaySession, now: float) -> bool:
    return now - session.committer.active_at > STALLED_AFTER


def subscription_statuses(
    subscriptions: SubscriptionSet, session: RelaySession | None, totals: Totals, now: float
) -> tuple[SubscriptionStatus, ...]:
    failed = [
        replace(
            subscription_status(each.resource, None, totals),
            state="Failed",
            rate=0.0,
            sink_reachable=False,
            last_error=each.error,
            last_error_age=0.0,
            reason=each.reason,
            meters=None,
        )
        for each in subscriptions.failed.values()
    ]
    built = [subscription_status(each.resource, session, totals, now) for each in subscriptions.parts.values()]
    return tuple(sorted((*failed, *built), key=lambda status: status.name))


def subscription_status(
    resource: EventSubscription, session: RelaySession | None, totals: Totals, now: float = 0.0
) -> SubscriptionStatus:
    """Return the status, limited to the partitions that this relay owns or reports. ``now``: by the session's clock."""
    name = full_name(resource)
    meters = totals.meters[name]
    number = next((n for n, s in session.streams.items() if s.name == name), None) if session else None
    held = session.workers(number) if session is not None and number is not None else []
    workers = sorted(held, key=lambda worker: worker.lease.key.partition)
    past, past_age = _last_error(workers, totals.last_error.get(name), now)
    unconnected = SubscriptionStatus(
        name=name,
        sink=resource.spec.sink.kind,
        partitions=resource.spec.partitions,
        published=totals.delivered[name] + sum(w.counters.delivered for w in workers),
        refused=totals.refused[name] + sum(w.counters.refused for w in workers),
        rate=meters.rate.at(now),
        sink_reachable=None,
        last_error=past,
        last_error_age=past_age,
        meters=meters,
    )
    if session is None or number is None:
        return unconnected
    subscription, stream = session.subscriptions[number], session.streams[number]
    backlog, lag_error = session.lags[number].backlog, session.lags[number].error
    owned = _owned(session, number, workers)
    orphans = _counted(sorted(session.orphans.get(number, ())), backlog) if backlog else []
    counted = [*owned, *orphans]
    unavailable = stream.health.reason
    full = next((w.parked.problem for w in workers if w.parked.problem), None)
    current = unavailable or stream.dead_topic.problem or full
    stale = f"lag is as it was last known: {lag_error}" if lag_error else None
    return replace(
        unconnected,
        state="Paused" if subscription.paused else "Running",
        partitions=subscription.partitions,
        lag=sum(p.lag for p in counted),
        lag_bounded=any(p.lag_bounded for p in counted),
        oldest_age=max((p.oldest_age for p in counted if p.oldest_age is not None), default=None),
        parked=sum(p.parked for p in counted),
        dead=backlog.dead if backlog else 0,
        sink_reachable=False if unavailable else True if stream.ready else None,
        last_error=current or past or stale,
        last_error_age=0.0 if current or (stale and not past) else past_age,
        blocked=backlog.blocked if backlog else 0,
        owned=tuple(owned),
        orphans=tuple(orphans),
        owners={h.key.partition: h.owner for h in session.membership.holdings if h.key.subscription == number},
    )


def _owned(session: RelaySession, number: int, workers: Iterable[PartitionWorker]) -> list[PartitionStatus]:
    """Return the status of the partitions that this relay delivers or, of a pull subscription, reports."""
    lag_error, backlog, caught_up = session.lags[number].error, session.lags[number].backlog, session.caught_up(number)
    if number in session.reported:
        return _counted(range(session.subscriptions[number].partitions), backlog)
    unknown = Lag(0, None, bounded=lag_error is not None and not caught_up)
    found = []
    for worker in workers:
        partition, parked = worker.lease.key.partition, worker.parked
        lag = backlog.partitions.get(partition, Lag(0, None)) if backlog and not caught_up else unknown
        pending = max(lag.pending, worker.pending)
        age = lag.oldest_age if pending else None
        error = parked.problem or worker.counters.current_error(parked.count)
        published = worker.counters.delivered
        found.append(PartitionStatus(partition, pending, lag.bounded, age, parked.count, published, error))
    return found


def _last_error(
    workers: Sequence[PartitionWorker], ended: tuple[str, float] | None, now: float
) -> tuple[str | None, float | None]:
    """Return the newest error that no success has followed, with its age; (None, None) without one."""
    found = [
        (worker.counters.error_at, error)
        for worker in workers
        if (error := worker.counters.current_error(worker.parked.count)) is not None
    ]
    if ended is not None and all(worker.counters.delivered_at <= ended[1] for worker in workers):
        found.append((ended[1], ended[0]))
    if not found:
        return None, None
    at, newest = max(found)
    return newest, now - at


def _counted(partitions: Iterable[int], backlog: Backlog | None) -> list[PartitionStatus]:
    """Return the status of partitions that this relay does not deliver: of consumers, or of a silent relay."""
    counts = backlog or Backlog()
    lags = [(partition, counts.partitions.get(partition, Lag(0, None))) for partition in partitions]
    return [
        PartitionStatus(partition, lag.pending, lag.bounded, lag.oldest_age, counts.parked.get(partition, 0), 0, None)
        for partition, lag in lags
    ]
