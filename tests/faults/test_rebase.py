"""Cursors in another database system: the relay refuses to start until an administrator chooses a rebase.

In a restored dump, transaction ids are behind the settled snapshots. After pg_upgrade they continue.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql

from mailboat.errors import ForeignDatabase
from mailboat.runtime.relay import Relay
from mailboat.runtime.relay_status import RelayState
from mailboat.store.cursor_changes import rebase
from mailboat.store.schema.migrate import apply_migrations
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST, find_upgradable
from support.databases import connected
from support.inprocess_relay import OURS, STAGED, StagedSink, events, serving, status_of, write
from support.ledger import Written, check_delivery
from support.manifests import Manifest
from support.relay_processes import outbox_relay, subscription
from support.renamed_table import COLUMNS, RENAMED, make_renamed
from support.wait import await_until

Stage = dict[str, StagedSink]
OrSkip = Callable[[Callable[[], PostgresServer]], PostgresServer]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, or_skip: OrSkip) -> Iterator[PostgresServer]:
    """Another database system, with much lower transaction ids."""
    directory = tmp_path_factory.mktemp("elsewhere")
    with or_skip(lambda: PostgresServer.start(find_postgres(NEWEST), directory)) as server:
        yield server


def restored(origin: Database, elsewhere: PostgresServer) -> Database:
    """Return the same database in the other system, copied with pg_dump and psql."""
    copy = Database(elsewhere, origin.name)
    elsewhere.create_database(origin.name, template="template0")
    tool, env = origin.server.binaries.tool, dict(origin.server.binaries.env)
    dump = subprocess.run([tool("pg_dump"), origin.url], env=env, capture_output=True, check=True)
    psql = [tool("psql"), "--quiet", "--set", "ON_ERROR_STOP=1", copy.url]
    done = subprocess.run(psql, env=env, input=_roles() + dump.stdout, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return copy


def _roles() -> bytes:
    """Return the statements that pg_dumpall --roles-only would contribute."""
    return b"""
    do $$ begin
        if to_regrole('mailboat_writer') is null then
            create role mailboat_writer nologin;
            create role mailboat_relay nologin;
            create role mailboat_consumer nologin;
        end if;
    end $$;
    """


def _manifests(url: str, *subscriptions: Manifest, layout: TableLayout = OURS) -> tuple[Manifest, ...]:
    if layout is OURS:
        return (outbox_relay(url), *subscriptions)
    columns = COLUMNS.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return (outbox_relay(url, table=layout.table, columns=columns), *subscriptions)


async def _rebase(copy: Database, layout: TableLayout = OURS, *, same_history: bool = False) -> int:
    async with connected(copy.url, "rebase") as link:
        return await rebase(link, layout, same_history=same_history)


def _overtake(origin: Database, copy: Database) -> None:
    """Advance the transaction ids of the copy beyond those of the original, as in an older system."""
    next_xid = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    ((ahead,),), ((behind,),) = origin.execute(next_xid), copy.execute(next_xid)
    with psycopg.connect(copy.url, autocommit=True) as connection, connection.pipeline():
        for _ in range(ahead - behind + 100):
            connection.execute("select pg_current_xact_id()")


async def _refused(relay: Relay) -> str:
    await await_until(lambda: relay.status().state is RelayState.FAILED, what="the refusal")
    return relay.status().message


async def _settled(relay: Relay, *names: str) -> None:
    await await_until(
        lambda: (
            all(status_of(relay, name).owned and status_of(relay, name).lag == 0 for name in names)
            and relay.status().database_reachable
        ),
        timeout=60,
        what="everything to be settled",
    )


@pytest.mark.parametrize("layout", [OURS, RENAMED], ids=["our names", "names of its own"])
async def test_a_restored_copy_is_refused_and_continues_after_a_rebase(
    outbox: Database, stage: Stage, elsewhere: PostgresServer, layout: TableLayout
) -> None:
    if layout is RENAMED:
        make_renamed(outbox)
    orders = subscription("orders", STAGED, partitions=4)
    with_news = subscription("news", STAGED, partitions=2, start={"from": "Latest"})
    before = write(outbox.url, events(200, 20, first=1), layout=layout)
    async with serving(*_manifests(outbox.url, orders, with_news, layout=layout)) as relay:
        await _settled(relay, "orders", "news")
        await await_until(lambda: len(stage["orders"].arrived) == 200, what="what came before")
    undelivered = write(outbox.url, events(100, 20, first=11), layout=layout)  # in the dump, but not delivered

    copy = restored(outbox, elsewhere)
    async with serving(*_manifests(copy.url, orders, with_news, layout=layout)) as relay:
        complaint = await _refused(relay)
        assert "mailboat rebase" in complaint
        assert "faults/orders" in complaint
        assert len(stage["orders"].arrived) == 200
        _overtake(outbox, copy)
        with pytest.raises(ForeignDatabase, match="does not continue the history of its cursors"):
            await _rebase(copy, layout, same_history=True)

        assert await _rebase(copy, layout) == 6
        later = write(copy.url, events(100, 20, first=16), layout=layout)
        await _settled(relay, "orders", "news")
        await await_until(lambda: len(stage["orders"].arrived) >= 400, what="what was not delivered yet")
        await await_until(lambda: len(stage["news"].arrived) >= 200, what="the news")
    check_delivery(before | undelivered | later, (), stage["orders"].arrivals)
    check_delivery(undelivered | later, (), stage["news"].arrivals)


async def test_a_copy_on_the_same_server_is_refused_too_and_loses_nothing(outbox: Database, stage: Stage) -> None:
    """The original may still deliver. A copy of the files continues the transaction ids, so no event is skipped."""
    orders = subscription("orders", STAGED, partitions=4)
    before = write(outbox.url, events(40, 20, first=1))
    async with serving(*_manifests(outbox.url, orders)) as relay:
        await await_until(lambda: len(stage["orders"].arrived) == 40, what="what came before")
        await _settled(relay, "orders")
    undelivered = write(outbox.url, events(20, 20, first=3))
    copy = Database(outbox.server, f"{outbox.name}_copy")
    outbox.server.create_database(copy.name, template=outbox.name)
    try:
        async with serving(*_manifests(copy.url, orders)) as relay:
            assert "mailboat rebase --same-history" in await _refused(relay)
            assert len(stage["orders"].arrived) == 40
            assert await _rebase(copy, same_history=True) == 4
            await await_until(lambda: len(stage["orders"].arrived) >= 60, what="what was not delivered yet")
            assert await _rebase(copy, same_history=True) == 0
    finally:
        outbox.server.drop_database(copy.name)
    check_delivery(before | undelivered, (), stage["orders"].arrivals)


@pytest.mark.verify
async def test_events_repartitioned_before_the_dump_are_not_sent_again(
    outbox: Database, stage: Stage, elsewhere: PostgresServer
) -> None:
    written = write(outbox.url, events(100, 20))
    for partitions in (4, 3):
        orders = subscription("orders", STAGED, partitions=partitions)
        async with serving(*_manifests(outbox.url, orders)) as relay:
            await _settled(relay, "orders")
            await await_until(lambda: len(stage["orders"].arrived) == 100, what="the events")

    copy = restored(outbox, elsewhere)
    await _rebase(copy)
    async with serving(*_manifests(copy.url, orders)) as relay:
        await _settled(relay, "orders")
        written |= write(copy.url, events(20, 20, first=6))
        await await_until(lambda: len(stage["orders"].arrived) >= 120, what="the news")
        await _settled(relay, "orders")
    check_delivery(written, (), stage["orders"].arrivals)


@pytest.mark.verify
async def test_parked_events_travel_with_the_dump(outbox: Database, stage: Stage, elsewhere: PostgresServer) -> None:
    backoff = {"initial": "50ms", "max": "100ms"}
    orders = subscription("orders", STAGED, delivery={"timeout": "5s", "backoff": backoff, "maxAttempts": 1000})
    written = write(outbox.url, events(100, 10))
    async with serving(*_manifests(outbox.url, orders)) as relay:
        stage["orders"].refuse(lambda message: message.key == "key 3")
        await _settled(relay, "orders")
        await await_until(lambda: len(stage["orders"].arrived) == 90, what="all that is not parked")
        await await_until(lambda: outbox.execute("select count(*) from mailboat.parked") == [(10,)], what="parked")
    copy = restored(outbox, elsewhere)
    await _rebase(copy)
    async with serving(*_manifests(copy.url, orders)) as relay:
        written |= write(copy.url, events(10, 10, first=11))
        await await_until(lambda: len(stage["orders"].arrived) == 99, what="the news of the other keys")
        stage["orders"].refuse(None)
        await await_until(lambda: len(stage["orders"].arrived) == 110, what="the parked key")
    check_delivery(written, (), stage["orders"].arrivals)


async def test_a_rebase_of_a_database_that_is_at_home_changes_nothing(outbox: Database, stage: Stage) -> None:
    orders = subscription("orders", STAGED, partitions=2)
    written = write(outbox.url, events(20, 5))
    async with serving(*_manifests(outbox.url, orders)) as relay:
        await _settled(relay, "orders")
        await await_until(lambda: len(stage["orders"].arrived) == 20, what="the events")
        assert await _rebase(outbox) == 0
        written |= write(outbox.url, events(20, 5, first=5))
        await await_until(lambda: len(stage["orders"].arrived) >= 40, what="the news")
        await _settled(relay, "orders")
    check_delivery(written, (), stage["orders"].arrivals)


async def _delivered_at_home(outbox: Database, stage: Stage, orders: Manifest) -> dict[str, Written]:
    """Write and deliver twenty events in the original system. No relay runs afterwards."""
    written = write(outbox.url, events(20, 5))
    async with serving(*_manifests(outbox.url, orders)) as relay:
        await _settled(relay, "orders")
        await await_until(lambda: len(stage["orders"].arrived) == 20, what="the events")
    return written


@pytest.mark.verify
@pytest.mark.parametrize("rebased_before", [False, True], ids=["at home", "rebased already"])
async def test_a_rebase_that_is_not_needed_loses_nothing_that_waits_behind_an_open_transaction(
    outbox: Database, stage: Stage, elsewhere: PostgresServer, rebased_before: bool
) -> None:
    orders = subscription("orders", STAGED, partitions=2)
    written = await _delivered_at_home(outbox, stage, orders)
    database = outbox
    if rebased_before:
        database = restored(outbox, elsewhere)
        assert await _rebase(database) == 2
        async with serving(*_manifests(database.url, orders)) as relay:
            await _settled(relay, "orders")
    with psycopg.connect(database.url) as old:
        old.execute("select pg_current_xact_id()")  # stays open, so every later transaction is younger
        written |= write(database.url, events(20, 5, first=5))
        assert await _rebase(database) == 0
    async with serving(*_manifests(database.url, orders)) as relay:
        await await_until(lambda: len(stage["orders"].arrived) >= 40, what="what waited")
        await _settled(relay, "orders")
    check_delivery(written, (), stage["orders"].arrivals)


@pytest.mark.verify
async def test_a_subscription_created_in_the_copy_receives_events_written_before_the_rebase(
    outbox: Database, stage: Stage, elsewhere: PostgresServer
) -> None:
    orders = subscription("orders", STAGED, partitions=2)
    written = await _delivered_at_home(outbox, stage, orders)
    copy = restored(outbox, elsewhere)
    young = subscription("young", STAGED, partitions=2, start={"from": "Latest"})
    with psycopg.connect(copy.url) as old:
        old.execute("select pg_current_xact_id()")
        async with serving(*_manifests(copy.url, orders, young)) as relay:
            await _refused(relay)
            news = write(copy.url, events(20, 5, first=5))
            assert await _rebase(copy) == 4
    async with serving(*_manifests(copy.url, orders, young)) as relay:
        await _settled(relay, "orders", "young")
        await await_until(lambda: len(stage["orders"].arrived) >= 40, what="the old one's news")
        await await_until(lambda: len(stage["young"].arrived) >= 20, what="the young one's news")
    check_delivery(written | news, (), stage["orders"].arrivals)
    check_delivery(news, (), stage["young"].arrivals)


@pytest.mark.parametrize(
    ("cursors", "why"),
    [
        ("system_identifier = 1, settled_snapshot = '900000000:900000000:'", "behind those that the cursors refer to"),
        ("system_identifier = partition", "written in 2 other systems"),
    ],
)
async def test_cursors_of_another_history_are_not_kept(
    outbox: Database, stage: Stage, cursors: LiteralString, why: str
) -> None:
    await _delivered_at_home(outbox, stage, subscription("orders", STAGED, partitions=2))
    outbox.execute(sql.SQL("update mailboat.cursors set {}").format(sql.SQL(cursors)))
    with pytest.raises(ForeignDatabase, match=why):
        await _rebase(outbox, same_history=True)


@pytest.mark.verify
async def test_after_pg_upgrade_all_progress_is_kept(stage: Stage, tmp_path: Path, or_skip: OrSkip) -> None:
    """The event of a late commit below the highest settled position is kept as well."""
    old = or_skip(lambda: PostgresServer.start(find_upgradable(), tmp_path / "old"))
    old.create_database("shop")
    before = Database(old, "shop")
    async with await psycopg.AsyncConnection.connect(before.url) as connection:
        await apply_migrations(connection, OURS.table)
    orders = subscription("orders", STAGED, partitions=4)
    (belated,) = events(1, 1, prefix="late")
    with psycopg.connect(before.url) as late:
        insert = "insert into mailboat.outbox (event_id, event_type, key, payload) values (%s, 'late', %s, %s)"
        late.execute(insert, (belated.event_id, belated.key, belated.payload))
        written = write(before.url, events(100, 20))
        async with serving(*_manifests(before.url, orders)) as relay:
            await await_until(lambda: len(stage["orders"].arrived) == 100, what="the events")
            await _settled(relay, "orders")
    places = "select partition, settled_snapshot::text, highest_settled_id, sequence from mailboat.cursors order by 1"
    stood_at = before.execute(places)
    old.stop()
    with old.upgrade(find_postgres(NEWEST), tmp_path / "new") as new:
        after = Database(new, "shop")
        async with serving(*_manifests(after.url, orders)) as relay:
            assert "mailboat rebase --same-history" in await _refused(relay)
            assert after.execute(places) == stood_at
            assert await _rebase(after, same_history=True) == 4
            written |= {belated.event_id: belated} | write(after.url, events(20, 20, first=6))
            await await_until(lambda: len(stage["orders"].arrived) == 121, what="what was late, and the news")
            await _settled(relay, "orders")
            assert await _rebase(after, same_history=True) == 0
    check_delivery(written, (), stage["orders"].arrivals)
