"""An event that kills the relay that delivers it.

Relays die, identify the event and record it as a dead letter. All other events arrive.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from mailboat import emit
from mailboat.delivery.parked_keys import RELAY_DIED
from mailboat.delivery.partition_worker import CAUTIOUS_AFTER
from mailboat_devservers.postgres import Database
from support import refusing_sink
from support.ledger import Ledger, Written, check_delivery, payload
from support.relay_processes import SWIFT, Fleet, RelayProcess, outbox_relay, subscription
from support.wait import wait_until

pytestmark = pytest.mark.verify

KEYS, EVENTS, LETHAL, PARTITIONS, MAX_ATTEMPTS = 5, 200, 103, 2, 6
MOST_DEATHS = 2 * (CAUTIOUS_AFTER + 1) + MAX_ATTEMPTS + 2
"""Deaths until the batch is identified, then the event, then until the event has no attempts left. Two are spare."""


@pytest.fixture
def fleet(each_outbox: Database, packages: Path, tmp_path: Path) -> Iterator[Fleet]:
    sink = {"custom": {"type": "picky", "config": {"path": str(tmp_path / "arrived")}}}
    backoff = {"initial": "10ms", "factor": 1, "max": "20ms"}
    delivery = {"timeout": "2s", "batchSize": 20, "maxAttempts": MAX_ATTEMPTS, "backoff": backoff}
    manifests = [outbox_relay(each_outbox.url), subscription("picky", sink, partitions=PARTITIONS, delivery=delivery)]
    with Fleet(tmp_path / "fleet", manifests, timings=SWIFT, env={"PYTHONPATH": str(packages)}) as fleet:
        yield fleet


@pytest.mark.parametrize("relays", [["alone"], ["one", "other"]], ids=len)
def test_an_event_that_kills_relays_is_found_and_given_up(
    relays: list[str], each_outbox: Database, fleet: Fleet, tmp_path: Path
) -> None:
    ledger, lethal = _write(each_outbox)
    running: dict[str, RelayProcess] = {}
    deaths = 0

    def all_else_arrived() -> bool:
        nonlocal deaths
        for name in relays:
            # A restarted container keeps its pod, so the relay keeps its name.
            if name in running and not running[name].running:
                assert running[name].status == -signal.SIGKILL, running[name].log_tail()
                deaths += 1
                assert deaths <= MOST_DEATHS, "nobody finds out what they die of"
                del running[name]
            if name not in running:
                running[name] = fleet.start(name)
        here = {arrival.event_id for arrival in refusing_sink.arrivals(tmp_path / "arrived")}
        return ledger.committed.keys() <= here and _dead(each_outbox) == [(lethal, RELAY_DIED)]

    wait_until(all_else_arrived, 90, "all but one to arrive, and that one to be dead")
    for relay in running.values():
        fleet.stop(relay)
    print(f"{deaths} deaths")  # noqa: T201 - shown with -s
    assert deaths >= CAUTIOUS_AFTER
    arrivals = list(refusing_sink.arrivals(tmp_path / "arrived"))
    check_delivery(ledger.committed, (), arrivals, kills=deaths, gapless=False)
    # Each death also interrupts the other partitions. After repeated deaths, the in-flight event of such a partition is
    # a crash suspect as well, until it arrives.
    suspects = {arrival.event_id for arrival in arrivals if arrival.attempt > 1}
    assert len(suspects) <= (PARTITIONS - 1) * deaths // CAUTIOUS_AFTER, "innocent events were counted attempts"
    assert each_outbox.execute("select count(*) from mailboat.parked") == [(0,)]


def _write(outbox: Database) -> tuple[Ledger, str]:
    ledger, lethal = Ledger(), ""
    with psycopg.connect(outbox.url) as connection:
        for index in range(EVENTS):
            key, number = f"key-{index % KEYS}", 1 + index // KEYS
            content = payload(key, number)
            headers = {"kills": "yes"} if index == LETHAL else None
            event_id = str(emit(connection, "perhaps.lethal", content, key=key, headers=headers))
            if headers:
                lethal = event_id
            else:
                ledger.commit([Written(event_id, key, number, content)])
    return ledger, lethal


def _dead(outbox: Database) -> list[tuple[str, str]]:
    return outbox.execute("select event_id::text, reason from mailboat.dead_letters")
