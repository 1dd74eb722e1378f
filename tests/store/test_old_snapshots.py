"""Report of the oldest snapshot of a database, with its holder and the remedy."""

from __future__ import annotations

import re
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from mailboat.store import examination
from mailboat.store.connection import PostgresConnection
from mailboat.store.examination import OLD, SnapshotWatch
from mailboat.store.sql import statements
from mailboat_devservers.postgres import Database
from support.databases import connected
from support.wait import await_until

_FEW_CURSORS = """
    with declared as (
        insert into mailboat.subscriptions (outbox, name, partitions) values ('mailboat.outbox', 'shop/few', 8)
        returning id
    )
    insert into mailboat.cursors (subscription_id, partition, settled_snapshot, epoch, system_identifier, timeline)
    select id, partition, '3:3:', gen_random_uuid(), 1, 1 from declared, generate_series(0, 7) as partition"""
_INCARNATION = "00000000-0000-0000-0000-000000000001"
_RELAY = f"""
    insert into mailboat.relays (id, incarnation, outbox, session_lock, beat_at, expires_at)
    values ('a relay', '{_INCARNATION}', 'mailboat.outbox', false, now(), now())"""
LONG_AGO = OLD.total_seconds() + 60


@pytest.mark.parametrize(
    "hold",
    ["set transaction isolation level repeatable read; select 1", "select pg_current_xact_id()"],
    ids=["a snapshot", "an open transaction that wrote"],
)
async def test_a_forgotten_transaction_is_reported_until_it_ends(
    each_outbox: Database, link: PostgresConnection, hold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SnapshotWatch()
    with psycopg.connect(each_outbox.url, application_name="forgotten") as held:
        held.execute(hold.encode())
        pid = held.info.backend_pid
        young = await watch.oldest(link)
        assert young.age > timedelta()
        assert young.warning == ""
        monkeypatch.setattr(examination, "OLD", timedelta())
        old = await watch.oldest(link)
        assert f'by process {pid}, user postgres, application "forgotten", idle in transaction.' in old.warning
        assert f"select pg_terminate_backend({pid})" in old.warning
    ended = sql.SQL("select from pg_stat_activity where pid = {}").format(sql.Literal(pid))
    await await_until(lambda: each_outbox.execute(ended) == [], what="the session to end")
    assert "forgotten" not in (await watch.oldest(link)).warning


async def test_a_holder_whose_begin_is_hidden_counts_from_when_it_was_seen_first(each_outbox: Database) -> None:
    each_outbox.execute("create role watcher login")
    now = 0.0
    watch = SnapshotWatch(lambda: now)
    with psycopg.connect(each_outbox.url, application_name="forgotten") as held:
        held.execute("select pg_current_xact_id()")
        pid = held.info.backend_pid
        try:
            async with connected(f"{each_outbox.url}?user=watcher") as link:
                assert (await watch.oldest(link)).warning == ""
                now = LONG_AGO
                found = await watch.oldest(link)
        finally:
            each_outbox.execute("drop role watcher")
    assert found.age.total_seconds() == LONG_AGO
    assert f'by process {pid}, user postgres, application "forgotten"' in found.warning
    assert f"select pg_terminate_backend({pid})" in found.warning
    assert "or longer" in found.warning


@pytest.mark.parametrize(
    "statement",
    ["head", "this_window", "advance", "still_open", "settle", "fence", "in_flight", "renew", "release"],
)
def test_statements_of_a_lease_find_its_cursor_by_epoch(each_outbox: Database, statement: str) -> None:
    """A lookup by primary key, or a scan of the whole index, passes all versions that a snapshot keeps."""
    windows = statements("windows")
    text = (statements("leases") if statement in ("renew", "release") else windows)[statement]
    if statement in ("head", "this_window"):
        text = f"with {text} select from {'head' if statement == 'head' else 'w'}"
    numbers: dict[str, int] = {}
    text = re.sub(r"%\((\w+)\)s", lambda found: f"${numbers.setdefault(found[1], len(numbers) + 1)}", text)
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute(_FEW_CURSORS)
        connection.execute("analyze mailboat.cursors")  # without statistics the planner expects many cursors
        connection.execute(windows["planner"])
        connection.execute(f"prepare found as {text}".encode())
        explain = f"explain execute found ({', '.join(['null'] * len(numbers))})"
        plan = "\n".join(row[0] for row in connection.execute(explain.encode()))
    assert re.search(r"using cursors_epoch on cursors[^\n]*\n *Index Cond: \((c\.)?epoch = ", plan), plan
    assert "cursors_pkey" not in plan


def test_a_heartbeat_finds_the_cursors_by_their_epochs(each_outbox: Database) -> None:
    """If one of the epochs is unknown, it reads all cursors of the subscription."""
    with psycopg.connect(each_outbox.url) as connection:
        connection.execute(_FEW_CURSORS)
        connection.execute("update mailboat.cursors set owner = 'a relay'")
        connection.execute(_RELAY)
        [(number,)] = connection.execute("select id from mailboat.subscriptions where name = 'shop/few'").fetchall()
        epochs = [
            epoch for (epoch,) in connection.execute("select epoch from mailboat.cursors where epoch is not null")
        ]
        where = {"relay": "a relay", "incarnation": _INCARNATION, "outbox": "mailboat.outbox", "ttl": 1.0}
        where |= {"serves": [number], "delivered": [number]}
        answers = []
        for known in (epochs, epochs[1:]):
            row = connection.execute(statements("leases")["beat"].encode(), where | {"epochs": known}).fetchone()
            assert row is not None
            [(subscription, partitions, owners, assigned, found)] = row[1]
            answers.append((subscription, partitions, owners, assigned))
            by_epoch = known is epochs
            assert row[4] is by_epoch
            assert sorted(found, key=str) == ([None] * 8 if by_epoch else sorted(map(str, epochs)))
        connection.rollback()
    assert answers[0] == answers[1] == (number, list(range(8)), ["a relay"] * 8, [None] * 8)
