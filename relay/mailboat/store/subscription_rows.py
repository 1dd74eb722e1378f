"""Creation and retirement of subscriptions: their rows and cursors, created once and shared by all relays.

Each subscription is declared in one transaction that locks its row, so relays that start together agree. The row stores
the newest config version that declared it; an older version, which a relay may still have, changes nothing.

A subscription is known by its name. If its resource is deleted and created again (another UID), it continues where it
stopped: the progress of a deleted one is kept for ``GRACE``. Later, or after `mailboat forget`, it begins at its start.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from psycopg import AsyncCursor, sql

from mailboat.errors import ConfigError, ForeignDatabase
from mailboat.store.connection import Pipeline, PostgresConnection, Row, first_row
from mailboat.store.cursor_changes import lock_cursors, repartition, unsettled_range
from mailboat.store.outbox_store import Backlog, Lag, Subscription
from mailboat.store.queries import Predicate, Since, SubscriptionQuery, effective_filter, like_patterns, predicate
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscription, EventSubscriptionSpec, full_name

log = logging.getLogger(__name__)

_SQL = statements("subscription_rows")
_PULL = statements("pull_policy")
GRACE: Final = timedelta(hours=24)
"""Time for which the progress of a deleted subscription is kept."""
_GRACE: Final = {"grace": GRACE.total_seconds()}


@dataclass(frozen=True, slots=True)
class ConfigVersion:
    """Version of the configuration that declares a subscription."""

    number: int = 0
    """Increases with every change; 0 if the configuration has no version."""
    relay_uid: str = ""
    """UID of the OutboxRelay resource; empty outside Kubernetes."""


UNCOUNTED = ConfigVersion()


async def declare(
    link: PostgresConnection,
    layout: TableLayout,
    resource: EventSubscription,
    *,
    may_lay_out: bool,
    version: ConfigVersion = UNCOUNTED,
) -> SubscriptionQuery | None:
    """Create the row and cursors of a subscription if missing, and update them if the manifest changed.

    ``may_lay_out`` permits repartitioning, for a relay that just started or received a new configuration. Otherwise two
    relays with two versions of a manifest would repartition in turns. Return None if a newer config version deleted or
    replaced this subscription.
    """
    name, spec = full_name(resource), resource.spec
    parameters: dict[str, Any] = {
        "outbox": layout.table,
        "name": name,
        "uid": resource.metadata.uid or "",
        "state": spec.state.value,
        "partitions": spec.partitions,
        "since_time": spec.start.time.isoformat() if spec.start.time else None,
        "since_id": spec.start.position,
        "version": version.number,
        "relay_uid": version.relay_uid,
        "latest": spec.start.from_ == "Latest",
        "system_identifier": link.server.system_identifier,
        "timeline": link.server.timeline,
        **_GRACE,
    }
    before = await unsettled_range(link, layout, parameters) if may_lay_out else None
    async with link.transaction() as cursor:
        found = await first_row(cursor, _SQL["find"], parameters)
        if found is None:
            await cursor.execute(_SQL["declare"], parameters)
            found = await first_row(cursor, _SQL["find"], parameters)
            assert found is not None
        number, uid, partitions, generation, state, since_time, since_id, stored_version, retired, expired = found
        outdated = version.number < stored_version
        if retired and outdated:
            return None
        if expired:
            await _clear(cursor, number)
            await cursor.execute(_SQL["renew"], {**parameters, "id": number})
            found = await first_row(cursor, _SQL["find"], parameters) or found
            number, uid, partitions, generation, state, since_time, since_id, *_ = found
        elif not outdated:
            if retired or (uid and parameters["uid"] and uid != parameters["uid"]):
                log.info("Subscription was created again and continues", extra={"subscription": name})
            values = {**parameters, "id": number, "uid": parameters["uid"] or uid}
            (state,) = await first_row(cursor, _SQL["redeclare"], values) or (state,)
        create_cursors = sql.SQL(_SQL["create_cursors"]).format(rows=layout.rows)
        await cursor.execute(create_cursors, {**parameters, "id": number, "partitions": partitions})
        if partitions != spec.partitions and may_lay_out and not outdated:
            link.take_time()  # all parked events are moved, however many
            generation = await repartition(cursor, layout, link.server, number, spec.partitions, before)
            partitions = spec.partitions
        if not outdated:
            await _declare_policy(cursor, number, name, spec, layout)
    subscription = Subscription(number, name, partitions, generation, state == "Paused")
    wanted = predicate(effective_filter(name, spec), Since(since_time, since_id))
    return SubscriptionQuery(subscription, wanted, pulled=spec.sink.pull is not None)


async def declare_pulled(
    link: PostgresConnection, layout: TableLayout, resources: Iterable[EventSubscription]
) -> list[str]:
    """Declare the pull subscriptions among the resources, for consumers without a relay; return their names."""
    pulled = [each for each in resources if each.spec.sink.pull is not None]
    for each in pulled:
        await declare(link, layout, each, may_lay_out=True)
    return [full_name(each) for each in pulled]


async def _declare_policy(
    cursor: AsyncCursor[Row], number: int, name: str, spec: EventSubscriptionSpec, layout: TableLayout
) -> None:
    """Store the policy that ``mailboat.pull`` reads, or delete it if the subscription is no longer pulled.

    The row holds all settings of the manifest, so that consumers in any language need only a database connection.
    """
    if spec.sink.pull is None:
        await cursor.execute(_PULL["withdraw"], {"subscription_id": number})
        return
    if layout.columns and spec.sink.pull.emit_dead_letters:
        raise ConfigError(
            f"EventSubscription {name}: spec.sink.pull.emitDeadLetters needs an outbox with Mailboat's own columns, and"
            f" the columns of {layout.table} are mapped. Remove it: dead letters are kept in mailboat.dead_letters."
        )
    delivery, tags = spec.delivery, effective_filter(name, spec).tags
    policy = {
        "subscription_id": number,
        "columns": json.dumps(dict(layout.columns)),
        "event_types": like_patterns(spec.filter.event_types),
        "aggregate_types": like_patterns(spec.filter.aggregate_types),
        "tags_all": list(tags.all_of) or None,
        "tags_any": list(tags.any_of) or None,
        "tags_none": list(tags.none_of) or None,
        "ordered": spec.ordering == "Key",
        "batch_size": spec.batch_size,
        "group_by": list(delivery.group_by),
        "max_group": delivery.max_group,
        "max_attempts": spec.max_attempts,
        "backoff_initial": delivery.backoff.initial.seconds,
        "backoff_factor": delivery.backoff.factor,
        "backoff_max": delivery.backoff.max.seconds,
        "backoff_jitter": delivery.backoff.jitter,
        "block_when_exhausted": delivery.on_exhausted == "Block",
        "emit_dead_letters": spec.sink.pull.emit_dead_letters,
        "no_handler": delivery.no_handler.value,
    }
    await cursor.execute(_PULL["declare"], policy)
    await cursor.execute(_PULL["create_functions"], {"subscription_id": number})


async def _clear(cursor: AsyncCursor[Row], number: int) -> None:
    """Delete cursors and parked events, including those being parked. The caller has locked the subscription's row."""
    await lock_cursors(cursor, _SQL["hold_cursors"], {"id": number})
    await cursor.execute(_SQL["clear"], {"id": number})


async def refuse_foreign_cursors(link: PostgresConnection, numbers: list[int]) -> None:
    """Raise ``ForeignDatabase`` if cursors were written in another database: a person must decide."""
    where = {"numbers": numbers, "system_identifier": link.server.system_identifier}
    names = [name for (name,) in await link.fetch(_SQL["foreign_cursors"], where)]
    if names:
        raise ForeignDatabase(
            f"the cursors of {', '.join(sorted(names))} were written in another database: this one is a restored"
            " copy, or was upgraded. After pg_upgrade run `mailboat rebase --same-history`. If this is a copy, and the"
            " one to continue with, run `mailboat rebase`: it continues behind the highest position that was settled."
        )


async def owned_by_others(
    link: PostgresConnection, outbox: str, relay: str, declared: Sequence[EventSubscription], version: ConfigVersion
) -> bool:
    """Return True if repartitioning now would revoke partitions of other relays, which may have batches in flight."""
    where = {"outbox": outbox, "relay": relay, "version": version.number}
    for each in declared:
        named = {"name": full_name(each), "partitions": each.spec.partitions}
        if await link.fetch(_SQL["owned_by_others"], where | named) == [(True,)]:
            return True
    return False


async def retire_removed(
    link: PostgresConnection, outbox: str, relay: str, named: Collection[str], version: ConfigVersion
) -> tuple[list[str], list[str]]:
    """Mark subscriptions whose resource was deleted. Their progress and parked events are kept for ``GRACE``.

    Return the names of those that were retired, and of those that a relay with an older configuration still serves.

    Only subscriptions declared by the same OutboxRelay (by UID), by this or an older config version, and served by no
    other relay: that one would lose its cursors and redeliver everything at its next start.
    """
    if not version.relay_uid:
        return [], []
    where: dict[str, Any] = {
        "outbox": outbox,
        "relay": relay,
        "names": list(named),
        "version": version.number,
        "relay_uid": version.relay_uid,
    }
    retired: list[str] = []
    awaited: list[str] = []
    for number, name, served in await link.fetch(_SQL["gone"], where):
        if served:
            awaited.append(name)
            continue
        async with link.transaction() as cursor:
            if await first_row(cursor, _SQL["retire"], {**where, "id": number}) is not None:
                await lock_cursors(cursor, _SQL["hold_cursors"], {"id": number})
                await cursor.execute(_SQL["release_cursors"], {"id": number})
                retired.append(name)
    return retired, awaited


async def probe_backlog(
    link: PostgresConnection,
    layout: TableLayout,
    number: int,
    partitions: int,
    wanted: Predicate,
    *,
    bound: int = 100_000,
    epochs: Sequence[str] = (),
    timeout: float = 0,
) -> Backlog:
    """Return the backlog of a subscription from a bounded probe instead of a full count.

    ``epochs``: those of its cursors, as far as known. ``timeout``: seconds per statement, 0 for no limit.
    """
    statement = sql.SQL(_SQL["backlog"]).format(rows=layout.rows, wanted=wanted)
    where = {"subscription": number, "partitions": partitions, "bound": bound, "epochs": list(epochs)}

    def probe(pipeline: Pipeline) -> Callable[[], Backlog]:
        pipeline.send(_SQL["probe_settings"], {"timeout": f"{timeout * 1000:.0f}ms"})
        lags = pipeline.send(statement, where)
        parked, dead, blocked = (pipeline.send(_SQL[name], where) for name in ("parked", "dead", "blocked"))

        def backlog() -> Backlog:
            by_partition = {partition: Lag(*rest) for partition, *rest in lags.fetchall()}
            (given_up,) = dead.fetchone() or (0,)
            (held_up,) = blocked.fetchone() or (0,)
            return Backlog(by_partition, dict(parked.fetchall()), given_up, held_up)

        return backlog

    return await link.read(probe)


async def clear_expired(link: PostgresConnection, outbox: str) -> list[str]:
    """Delete progress and parked events of subscriptions deleted longer than ``GRACE`` ago. Their dead letters stay."""
    cleared = []
    for number, name in await link.fetch(_SQL["expired"], {"outbox": outbox, **_GRACE}):
        async with link.transaction() as cursor:
            if await first_row(cursor, _SQL["lock_expired"], {"id": number, **_GRACE}) is not None:
                await _clear(cursor, number)
                cleared.append(name)
    return cleared
