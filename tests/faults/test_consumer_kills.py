"""Kills of consumers around their handlers: no effect is lost or doubled, and keys keep their order (C1 to C5, C9)."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from mailboat import emit
from mailboat.consumer.pull_source import ConsumerPoint
from mailboat_devservers.postgres import Database, PostgresServer
from support.consumer_main import EFFECTS, NAME
from support.databases import migrated_database
from support.ledger import Ledger, Written, payload
from support.pull_consumers import declare
from support.racing_writers import Racers
from support.wait import wait_until

TESTS = Path(__file__).parents[1]
BACKOFF = {"initial": "5ms", "max": "20ms"}
SPEC: dict[str, Any] = {"partitions": 4, "delivery": {"batchSize": 20, "maxAttempts": 1000, "backoff": BACKOFF}}
GROUPED = {**SPEC, "delivery": {**SPEC["delivery"], "groupBy": ["transaction"]}}


@pytest.fixture
def outbox(postgres: PostgresServer) -> Iterator[Database]:
    for database in migrated_database(postgres):
        database.execute(EFFECTS)
        yield database


class Consumers:
    """Processes of one subscription. Every process is killed at the end of the block."""

    def __init__(self, url: str, spec: dict[str, Any]) -> None:
        self._orders = {"url": url, "spec": spec}
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, **orders: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "support.consumer_main", json.dumps({**self._orders, **orders})]
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        self.running.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
        return self.running[-1]

    def stop(self, *processes: subprocess.Popen[bytes]) -> None:
        """Stop processes with SIGTERM and check their exit status.

        The program installs its signal handler in ``Consumer.run``, so wait for that handler before the signal.
        """
        for process in processes:
            wait_until(partial(catches_sigterm, process.pid), timeout=60, what="a handler of SIGTERM")
            process.terminate()
        assert [each.wait(timeout=60) for each in processes] == [0] * len(processes)

    def __enter__(self) -> Consumers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def catches_sigterm(pid: int) -> bool:
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def is_settled(outbox: Database) -> bool:
    """Return True if no event waits, neither in the outbox nor parked."""
    with psycopg.connect(outbox.url) as connection:
        question = "select pending = 0 and not bounded and parked = 0 from mailboat.pull_lag(%s)"
        try:
            return connection.execute(question, [NAME]).fetchone() == (True,)
        except psycopg.errors.UndefinedObject:  # no consumer has declared the subscription yet
            return False


def has_handled(outbox: Database, pid: int) -> bool:
    """Return True if the process has committed an effect.

    Without this check, on a busy machine all kills would hit processes that are still starting.
    """
    found = sql.SQL("select exists (select from effects where consumer = {})").format(pid)
    return outbox.execute(found) == [(True,)]


def check_effects(outbox: Database, ledger: Ledger, *, transactions_whole: bool = False) -> None:
    rows = outbox.execute("select event_id::text, key, number from effects order by ordinal")
    done = [event_id for event_id, _, _ in rows]
    assert len(done) == len(set(done)), "an effect happened twice"
    assert set(done) == set(ledger.committed), "effects are lost, or of events that were rolled back"
    last: dict[str, int] = {}
    for _, key, number in rows:
        assert number > last.get(key, 0), f"key {key}: {number} came after {last.get(key)}"
        last[key] = number
    if transactions_whole:
        cut = (
            "select count(*) from (select from effects f join mailboat.outbox o using (event_id)"
            " group by o.xid, o.slot % 4 having count(distinct f.xmin::text) > 1) x"
        )
        assert outbox.execute(cut) == [(0,)]


def feed(outbox: Database, ledger: Ledger, start: int, count: int) -> None:
    with psycopg.connect(outbox.url) as connection:
        for index in range(start, start + count):
            key, number = f"key-{index % 5}", 1 + index // 5
            content = payload(key, number)
            event_id = str(emit(connection, "x", content, key=key))
            ledger.commit([Written(event_id, key, number, content)])


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.verify)])
@pytest.mark.parametrize("point", ConsumerPoint)
def test_a_consumer_is_killed_at_every_point(outbox: Database, point: ConsumerPoint, times: int) -> None:
    ledger = Ledger()
    with Consumers(outbox.url, SPEC) as consumers:
        for n in range(times):
            victim = consumers.start(die_at=point.value, passage=1 + n % 3)
            fed = n * 100
            while victim.poll() is None and fed < (n + 1) * 100:
                feed(outbox, ledger, fed, 10)
                fed += 10
                time.sleep(0.02)  # part of the load, not a wait for a condition
            feed(outbox, ledger, fed, (n + 1) * 100 - fed)
            assert victim.wait(timeout=60) == -signal.SIGKILL
        last = consumers.start()
        wait_until(lambda: is_settled(outbox), timeout=60, what="everything to be handled")
        consumers.stop(last)
    check_effects(outbox, ledger)


@pytest.mark.timeout(600)  # the waits below add up to more than the default
@pytest.mark.parametrize("spec", [SPEC, GROUPED], ids=["single", "grouped"])
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.verify)])
def test_consumers_are_killed_at_random_while_writers_race(
    outbox: Database, spec: dict[str, Any], seconds: int
) -> None:
    chance, kills = random.Random(seconds), 0
    with Consumers(outbox.url, spec) as consumers, Racers(outbox.url, writers=8, dawdle=0.2) as racers:
        alive = [consumers.start() for _ in range(3)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            victim = alive.pop(chance.randrange(3))
            wait_until(partial(has_handled, outbox, victim.pid), timeout=120, what="an effect of the victim")
            racers.wait(chance.random())
            killed = chance.random() < 0.8
            (victim.kill if killed else victim.terminate)()
            kills += killed
            alive.append(consumers.start())
        ledger = racers.finish()
        wait_until(lambda: is_settled(outbox), timeout=240, what="everything to be handled")
        consumers.stop(*alive)
    check_effects(outbox, ledger, transactions_whole=spec is GROUPED)
    written = f"{len(ledger.committed)} events, {len(ledger.rolled_back)} rolled back"
    started = len(consumers.running)
    print(f"{written}, {kills} kills of {started} consumers: 0 lost, 0 twice, 0 out of order")  # noqa: T201 - shown with -s


def test_an_event_that_kills_the_process_is_given_up(outbox: Database) -> None:
    spec = {**SPEC, "partitions": 1, "delivery": {**SPEC["delivery"], "maxAttempts": 2}}
    ledger = Ledger()
    feed(outbox, ledger, 0, 5)
    with psycopg.connect(outbox.url) as connection:
        emit(connection, "lethal", payload("lethal", 1), key="lethal")
    feed(outbox, ledger, 5, 5)
    with Consumers(outbox.url, spec) as consumers:
        current = consumers.start()

        def restarted_until_done() -> bool:
            nonlocal current
            if current.poll() is not None:
                current = consumers.start()
            return outbox.execute("select count(*) from mailboat.dead_letters") == [(1,)] and is_settled(outbox)

        wait_until(restarted_until_done, timeout=120, what="the lethal event to be given up")
    assert outbox.execute("select reason, attempts, event_type from mailboat.dead_letters") == [
        ("ConsumerDied", 2, "lethal")
    ]
    check_effects(outbox, ledger)


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_failover_loses_and_doubles_nothing_and_does_not_hold_up_retention(
    primary: PostgresServer, tmp_path: Path
) -> None:
    """Effects and progress reach the standby together, or not at all."""
    with primary, primary.clone_standby(tmp_path / "standby") as standby:
        primary.execute("alter system set synchronous_standby_names = '*'")
        primary.execute("select pg_reload_conf()")
        in_sync = "select sync_state from pg_stat_replication"
        wait_until(lambda: primary.execute(in_sync) == [("sync",)], 60, "a synchronous standby")
        primary.execute(EFFECTS)
        before, after = Database(primary, "postgres"), Database(standby, "postgres")
        url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        ledger = Ledger()
        with Consumers(f"{url}?target_session_attrs=read-write", SPEC) as consumers:
            alive = [consumers.start(), consumers.start()]
            for start in range(0, 1000, 50):
                feed(before, ledger, start, 50)
            wait_until(lambda: before.execute("select count(*) > 100 from effects") == [(True,)], 60, "some effects")
            primary.kill()
            standby.execute("alter system set synchronous_standby_names = ''")
            standby.promote()
            feed(after, ledger, 1000, 500)
            wait_until(lambda: is_settled(after), timeout=240, what="everything to be handled")
            consumers.stop(*alive)
        check_effects(after, ledger)
        assert after.execute("select distinct timeline from mailboat.cursors where highest_settled_id > 0") == [(2,)]


@pytest.mark.verify
def test_pauses_and_changes_of_partitions_under_load_lose_and_double_nothing(outbox: Database) -> None:
    delivery = SPEC["delivery"]
    with Consumers(outbox.url, SPEC) as consumers, Racers(outbox.url, writers=4, dawdle=0.2) as racers:
        alive = [consumers.start() for _ in range(3)]
        wait_until(lambda: outbox.execute("select count(*) > 0 from effects") == [(True,)], 60, "the first effect")
        for partitions in (7, 2, 5, 1, 4):
            outbox.execute("update mailboat.subscriptions set state = 'Paused'")
            racers.wait(0.5)
            outbox.execute("update mailboat.subscriptions set state = 'Running'")
            declare(outbox, name="view", namespace="faults", partitions=partitions, delivery=delivery)
            racers.wait(1.0)
        ledger = racers.finish()
        wait_until(lambda: is_settled(outbox), timeout=240, what="everything to be handled")
        consumers.stop(*alive)
    check_effects(outbox, ledger)
