"""Report of the oldest snapshot of a database, with its holder and the remedy."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from mailboat.store import old_snapshots
from mailboat.store.connection import PostgresConnection
from mailboat.store.old_snapshots import OLD, SnapshotWatch
from mailboat.store.sql import statements
from mailboat_devservers.postgres import Database
from support.databases import connected
from support.wait import await_until

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
        monkeypatch.setattr(old_snapshots, "OLD", timedelta())
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
    ["head", "this_window", "open", "advance", "still_open", "settle", "fence", "in_flight", "renew", "release"],
)
def test_statements_of_a_lease_find_its_cursor_by_epoch(outbox: Database, statement: str) -> None:
    """A lookup by primary key passes all versions of the cursor that a snapshot keeps."""
    windows = statements("windows")
    text = (statements("leases") if statement in ("renew", "release") else windows)[statement]
    if statement in ("head", "this_window"):
        text = f"with {text} select from {'head' if statement == 'head' else 'w'}"
    snapshot = "1:1:"
    parameters = {
        "epoch": str(uuid4()), "epochs": [str(uuid4())], "settled_snapshot": snapshot, "window_snapshot": snapshot,
        "window_snapshots": [snapshot], "positions": [1], "sequences": [1], "closes": [True],
        "next_snapshots": [None], "in_flight": [True],
        "lowest": None, "highest": None, "timeline": 1, "pooled": False, "level": "on",
    }  # fmt: skip
    with psycopg.connect(outbox.url) as connection:
        connection.execute(windows["planner"])
        plan = "\n".join(row[0] for row in connection.execute(f"explain {text}".encode(), parameters))
    assert "cursors_epoch" in plan
    assert "cursors_pkey" not in plan
