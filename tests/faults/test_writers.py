"""Guarantees G10 and G8.

G10: no business transaction fails or waits because of relays. G8: an idle relay writes only its heartbeat.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg
import pytest

from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from support.databases import migrated_database
from support.inprocess_relay import STAGED, StagedSink, events, serving, status_of, write
from support.ledger import Written, check_delivery, payload
from support.relay_processes import Fleet, outbox_relay, subscription
from support.steady_writer import SteadyWriter
from support.wait import await_until

Stage = dict[str, StagedSink]
OrSkip = Callable[[Callable[[], PostgresServer]], PostgresServer]


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_relays_killed_at_any_point_fail_no_writer(outbox: Database, tmp_path: Path) -> None:
    sink = {"log": {"path": str(tmp_path / "arrived.jsonl")}}
    orders = subscription("orders", sink, partitions=8)
    chance = random.Random(7)
    with Fleet(tmp_path / "fleet", [outbox_relay(outbox.url), orders]) as fleet, ExitStack() as stack:
        # Writers may wait for each other for part of the lock timeout on a busy disk.
        writers = [stack.enter_context(SteadyWriter(outbox, lock_timeout="2s")) for _ in range(6)]
        fleet.start_connected(2)
        until = time.monotonic() + 30
        while time.monotonic() < until or fleet.kills <= 10:
            fleet.start()
            kill_at = time.monotonic() + chance.uniform(0.2, 1.5)
            while time.monotonic() < kill_at:
                chance.choice(writers).writes_on(1)
            fleet.kill(chance.choice(list(fleet.relays.values())))
            for writer in writers:
                writer.writes_on(10)


# ---- every way of writing -------------------------------------------------------------------------------------------


@pytest.fixture
def two_phase(tmp_path: Path, or_skip: OrSkip) -> Iterator[Database]:
    settings = {"max_prepared_transactions": "20"}
    with or_skip(
        lambda: PostgresServer.start(find_postgres(NEWEST), tmp_path / "two-phase", settings=settings)
    ) as server:
        yield from migrated_database(server)


@pytest.mark.verify
async def test_two_phase_commit_works_while_a_relay_is_idle_and_its_events_arrive_after_the_commit(
    two_phase: Database, stage: Stage
) -> None:
    manifests = outbox_relay(two_phase.url), subscription("orders", STAGED, partitions=2)
    async with serving(*manifests) as relay:
        await await_until(lambda: len(status_of(relay, "orders").owned) == 2, what="the relay")
        committed: dict[str, Written] = {}
        for number in range(1, 11):
            # An idle relay would request NOTIFY, and a transaction with a NOTIFY cannot be prepared.
            await await_until(lambda: status_of(relay, "orders").lag == 0, what="the relay to be at rest")
            late, early = (Written(str(uuid.uuid4()), k, number, payload(k, number)) for k in ("late", "early"))
            undone = Written(str(uuid.uuid4()), "late", number, payload("late", number))
            with psycopg.connect(two_phase.url) as connection:
                connection.tpc_begin(connection.xid(1, f"done {number}", "shop"))
                _insert(connection, late)
                connection.tpc_prepare()
                committed |= write(two_phase.url, [early])
                connection.tpc_commit()
                committed[late.event_id] = late
                connection.tpc_begin(connection.xid(1, f"undone {number}", "shop"))
                _insert(connection, undone)
                connection.tpc_prepare()
                connection.tpc_rollback()
            await await_until(lambda n=number: len(stage["orders"].arrived) >= 2 * n, what="both events")  # type: ignore[misc]
    check_delivery(committed, (), stage["orders"].arrivals)


def _insert(connection: psycopg.Connection[tuple[object, ...]], event: Written) -> None:
    connection.execute(
        "insert into mailboat.outbox (event_id, event_type, key, payload) values (%s, 'order.placed', %s, %s)",
        [event.event_id, event.key, event.payload],
    )


async def test_events_of_triggers_and_of_serializable_writers_arrive(outbox: Database, stage: Stage) -> None:
    """The writers lock the row of their key first, as the documentation requires."""
    outbox.execute(
        """
        create table accounts (key text primary key, number integer not null default 0);
        insert into accounts select 'account ' || n from generate_series(0, 3) n;
        create function tell() returns trigger language plpgsql as $$
        begin
            insert into mailboat.outbox (event_type, key, payload)
            values ('account.changed', new.key, convert_to(json_build_object('number', new.number)::text, 'UTF8'));
            return null;
        end $$;
        create trigger tell after update on accounts for each row execute function tell();
        """
    )

    def work(seed: int) -> None:
        chance = random.Random(seed)
        with psycopg.connect(outbox.url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
            for _ in range(40):
                key = f"account {chance.randrange(4)}"
                with suppress(psycopg.errors.SerializationFailure), connection.transaction():
                    connection.execute("update accounts set number = number + 1 where key = %s", [key])

    async with serving(outbox_relay(outbox.url), subscription("orders", STAGED, partitions=4)):
        await asyncio.gather(*(asyncio.to_thread(work, seed) for seed in range(6)))
        numbers = dict(outbox.execute("select key, number from accounts where number > 0"))
        await await_until(lambda: len(stage["orders"].arrived) >= sum(numbers.values()) > 0, what="all of it")
    assert stage["orders"].numbers == {key: [*range(1, last + 1)] for key, last in numbers.items()}


# ---- G8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.verify
async def test_an_idle_relay_writes_nothing_but_its_heartbeat(outbox: Database, stage: Stage) -> None:
    subscriptions = [subscription(f"orders-{n}", STAGED, partitions=8) for n in range(3)]
    async with serving(outbox_relay(outbox.url), *subscriptions, timings=None) as relay:
        committed = write(outbox.url, events(100, 10))
        await await_until(lambda: all(len(s.arrived) == 100 for s in stage.values()) and len(stage) == 3, what="flow")
        await await_until(lambda: all(status_of(relay, name).lag == 0 for name in stage), what="rest")
        assert committed
        await await_until(lambda: outbox.execute("select bool_and(active) from mailboat.wakeup_requests") == [(True,)])
        _write_down_who_writes(outbox)
        await _beats(outbox, 3)  # work in flight ends
        outbox.execute("delete from public.writes")
        began = time.monotonic()
        written = await _beats(outbox, 6)
        took = time.monotonic() - began
    assert set(written) == {"relays"}
    assert written["relays"] <= took + 2, "one a second"


def _write_down_who_writes(outbox: Database) -> None:
    """Record every row that any session writes to a table of the schema.

    Statistics of the server would come too late.
    """
    outbox.execute(
        """
        create table public.writes (what text not null);
        create function public.note() returns trigger language plpgsql as $$
        begin
            insert into public.writes values (tg_table_name);
            return null;
        end $$;
        do $$
        declare
            tab regclass;
        begin
            for tab in
                select oid from pg_class
                where relnamespace = 'mailboat'::regnamespace and relkind in ('r', 'p') and not relispartition
            loop
                execute format('create trigger note after insert or update or delete on %s'
                               ' for each row execute function public.note()', tab);
            end loop;
        end $$;
        """
    )


async def _beats(outbox: Database, count: int) -> Counter[str]:
    """Wait for a number of heartbeats and return the written rows by table."""

    def written() -> Counter[str]:
        counted = Counter[str](what for (what,) in outbox.execute("select what from public.writes"))
        return counted if counted["relays"] >= count else Counter()

    return await await_until(written, what=f"{count} heartbeats")
