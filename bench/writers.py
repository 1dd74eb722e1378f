"""Commit rates of writers: one event per commit, sixteen connections, by pgbench.

The reference is a plain table of the same columns with a primary key: no partitions, no checks, no trigger. Rounds
alternate, and the median of each row counts. The first round of a row is left out, since it fills the caches of
Postgres. NOTIFY makes Postgres commit one transaction after the other, so rows with a relay are measured by
``wake.notify``.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import psutil
import psycopg
from setup import Relay, Stage

CONNECTIONS = 16
_LAST_SESSION = 2.0
"""Seconds for the last session to end. An autovacuum worker may run longer."""
_INSERT = """\
insert into {table} (event_type, aggregate_type, aggregate_id, key, payload)
values ('order.placed', 'order', 'order-' || :client_id, 'order-' || :client_id, convert_to(repeat('x', 200), 'UTF8'));
"""
_EMIT = (
    "select mailboat.emit('order.placed', convert_to(repeat('x', 200), 'UTF8'), 'order', 'order-' || :client_id,"
    " 'order-' || :client_id);"
)
_PLAIN = """
create table public.plain (
    id bigint generated always as identity primary key, created_at timestamptz not null default clock_timestamp(),
    event_id uuid not null default gen_random_uuid(), event_type text not null, aggregate_type text, aggregate_id text,
    key text, payload bytea, content_type text not null default 'application/json', headers jsonb,
    tags text[] not null default '{}', traceparent text)
"""
PLAIN, OUTBOX, EMIT = "plain table", "outbox, no relay", "mailboat.emit, no relay"


@dataclass(frozen=True, slots=True)
class Commits:
    """Medians of one row."""

    name: str
    rate: float
    cpu: float
    """CPU time of the writers' sessions per commit, in microseconds."""


def measure(stage: Stage, transactions: int, rounds: int) -> Iterator[Commits]:
    """Measure all rows in turn. ``transactions`` are per connection and round."""
    bare = stage.new_database("writers")
    with psycopg.connect(bare, autocommit=True) as connection:
        connection.execute(_PLAIN)
    rows = {
        PLAIN: (bare, _INSERT.format(table="public.plain")),
        OUTBOX: (bare, _INSERT.format(table="mailboat.outbox")),
        EMIT: (bare, _EMIT),
    }
    with ExitStack() as running:
        for notify in ("Never", "Auto", "Always"):
            name = f"writers-{notify.lower()}"
            url = stage.new_database(name.replace("-", "_"))
            running.enter_context(Relay(stage, url, stage.new_topic(name), notify=notify)).until_ready()
            rows[f"outbox, wake.notify: {notify}"] = (url, _INSERT.format(table="mailboat.outbox"))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
        for _ in range(rounds + 1):
            for name, (url, script) in rows.items():
                found[name].append(_pgbench(stage, url, script, transactions))
    for name, measured in found.items():
        rates, cpu = zip(*measured[1:], strict=True)
        yield Commits(name, median(rates), median(cpu))


def _pgbench(stage: Stage, url: str, script: str, transactions: int) -> tuple[float, float]:
    """Return commits per second, and microseconds of CPU time per commit."""
    file = stage.folder / "write.sql"
    file.write_text(script)
    binaries = stage.postgres.binaries
    server = psutil.Process(stage.postgres.pid)
    before, sessions = _ended(server), {child.pid for child in server.children()}
    done = subprocess.run(
        [binaries.tool("pgbench"), "--no-vacuum", "--protocol=prepared", f"--client={CONNECTIONS}", "--jobs=1",
         f"--transactions={transactions}", f"--file={file}", url],
        env={**os.environ, **binaries.env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    rate = re.search(r"tps = ([\d.]+)", done.stdout)
    if done.returncode != 0 or rate is None:
        raise RuntimeError(f"pgbench failed: {done.stderr.strip()}")
    deadline = time.monotonic() + _LAST_SESSION
    while {child.pid for child in server.children()} - sessions and time.monotonic() < deadline:
        time.sleep(0.01)
    return float(rate[1]), (_ended(server) - before) / (CONNECTIONS * transactions) * 1e6


def _ended(server: psutil.Process) -> float:
    """Return the CPU seconds of all ended sessions."""
    times = server.cpu_times()
    return float(times.children_user + times.children_system)
