"""Status of subscriptions from the state of a session. Reads memory only: no queries, no changes."""

from __future__ import annotations

from collections.abc import Iterable

from mailboat.delivery.partition_worker import PartitionWorker
from mailboat.runtime.relay_status import PartitionStatus, SubscriptionStatus
from mailboat.runtime.session import RelaySession
from mailboat.runtime.subscription_set import InvalidSubscription
from mailboat.runtime.totals import Totals
from mailboat.store.outbox_store import Backlog, Lag
from mailboat_spec import EventSubscription, full_name

STALLED_AFTER = 90.0
"""Seconds without progress of the committer after which only a restart helps. Every wait of the committer ends sooner:
idle waits after ``ACTIVE_EVERY``, database queries with the statement deadline."""


def stalled(session: RelaySession, now: float) -> bool:
    """Return whether a running session makes no progress."""
    return now - session.committer.active_at > STALLED_AFTER


def delivered(name: str, session: RelaySession | None, totals: Totals) -> int:
    """Return the events delivered since the process started, by ended and running workers."""
    live = (owned.worker for owned in session.owned.values() if owned.worker.stream.name == name) if session else ()
    return totals.delivered[name] + sum(worker.counters.delivered for worker in live)


def failed_status(failed: InvalidSubscription, totals: Totals) -> SubscriptionStatus:
    """Return the status of a subscription that could not be built."""
    name = full_name(failed.resource)
    return SubscriptionStatus(
        name=name,
        sink=failed.resource.spec.sink.kind,
        state="Failed",
        partitions=failed.resource.spec.partitions,
        published=totals.delivered[name],
        refused=totals.refused[name],
        sink_reachable=False,
        last_error=failed.error,
        last_error_age=0.0,
        reason=failed.reason,
    )


def subscription_status(
    resource: EventSubscription, session: RelaySession | None, totals: Totals, now: float = 0.0
) -> SubscriptionStatus:
    """Return the status of a subscription, limited to the partitions that this relay owns or reports.

    ``now``: time by the clock of the session.
    """
    name = full_name(resource)
    number = next((n for n, s in session.streams.items() if s.name == name), None) if session else None
    workers = (
        {key.partition: owned.worker for key, owned in session.owned.items() if key.subscription == number}
        if session
        else {}
    )
    backlog = session.lag.backlogs.get(number) if session and number is not None else None
    caught_up = session is not None and number is not None and session.caught_up(number)
    probe_error = session.lag.errors.get(number) if session and number is not None else None
    unknown = Lag(0, None, bounded=probe_error is not None and not caught_up)
    owned = []
    for partition, worker in sorted(workers.items()):
        lag = backlog.partitions.get(partition, Lag(0, None)) if backlog and not caught_up else unknown
        pending = max(lag.pending, worker.pending)
        owned.append(
            PartitionStatus(
                partition,
                pending,
                lag.bounded,
                lag.oldest_age if pending else None,
                worker.parked.count,
                worker.counters.delivered,
                worker.parked.problem or worker.counters.current_error(worker.parked.count),
            )
        )
    if session is not None and number in session.reported:
        owned = _counted(range(session.subscriptions[number].partitions), backlog)
    orphans = _counted(sorted(session.orphans.get(number, ())), backlog) if session and number and backlog else []
    counted = [*owned, *orphans]
    subscription = session.subscriptions.get(number) if session and number is not None else None
    stream = session.streams.get(number) if session and number is not None else None
    unavailable = next((p.counters.unavailable for p in workers.values() if p.counters.unavailable), None)
    problem = unavailable or (stream.problem if stream else None)
    topic_problem = stream.dead_topic.problem if stream else None
    current = problem or topic_problem or next((p.parked.problem for p in workers.values() if p.parked.problem), None)
    past, past_age = _last_error(workers.values(), totals.last_error.get(name), now)
    lag_error = f"lag is as it was last known: {probe_error}" if probe_error else None
    return SubscriptionStatus(
        name=name,
        sink=resource.spec.sink.kind,
        state="Paused" if subscription and subscription.paused else "Running",
        partitions=subscription.partitions if subscription else resource.spec.partitions,
        lag=sum(p.lag for p in counted),
        lag_bounded=any(p.lag_bounded for p in counted),
        oldest_age=max((p.oldest_age for p in counted if p.oldest_age is not None), default=None),
        parked=sum(p.parked for p in counted),
        dead=backlog.dead if backlog else 0,
        published=delivered(name, session, totals),
        refused=totals.refused[name] + sum(p.counters.refused for p in workers.values()),
        rate=totals.meters[name].rate.at(now),
        sink_reachable=False if problem else True if stream and stream.ready else None,
        last_error=current or past or lag_error,
        last_error_age=0.0 if current or (lag_error and not past) else past_age,
        meters=totals.meters[name],
        blocked=backlog.blocked if backlog else 0,
        owned=tuple(owned),
        orphans=tuple(orphans),
        owners={h.key.partition: h.owner for h in session.membership.holdings if h.key.subscription == number}
        if session and session.membership
        else {},
    )


def _last_error(
    workers: Iterable[PartitionWorker], ended: tuple[str, float] | None, now: float
) -> tuple[str | None, float | None]:
    """Return the newest error that no success has followed, with its age; (None, None) without one."""
    workers = list(workers)
    errors = [
        (worker.counters.error_at, error)
        for worker in workers
        if (error := worker.counters.current_error(worker.parked.count)) is not None
    ]
    if ended is not None and all(worker.counters.delivered_at <= ended[1] for worker in workers):
        errors.append((ended[1], ended[0]))
    if not errors:
        return None, None
    at, newest = max(errors)
    return newest, now - at


def _counted(partitions: Iterable[int], backlog: Backlog | None) -> list[PartitionStatus]:
    """Return the status of partitions that this relay does not deliver: of consumers, or of a silent relay."""
    counts = backlog or Backlog({}, {}, 0, 0)
    lags = [(partition, counts.partitions.get(partition, Lag(0, None))) for partition in partitions]
    return [
        PartitionStatus(partition, lag.pending, lag.bounded, lag.oldest_age, counts.parked.get(partition, 0), 0, None)
        for partition, lag in lags
    ]
