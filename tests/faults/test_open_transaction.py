"""A transaction that stays open delays its own event and no other event."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import psycopg
import pytest

from conftest import TopicFactory
from mailboat import emit
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from support.collectors import KafkaCollector
from support.ledger import Ledger, Written, check_delivery, payload
from support.manifests import kafka_sink
from support.relay_processes import WALKING, Fleet, outbox_relay, subscription


@pytest.mark.verify
def test_a_transaction_held_open_delays_no_other_event(
    outbox: Database, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(kfake)
    manifests = [outbox_relay(outbox.url), subscription("kfake", kafka_sink(kfake.bootstrap, topic))]
    ledger = Ledger()
    with (
        Fleet(tmp_path / "fleet", manifests, limits=WALKING) as fleet,
        KafkaCollector(kfake.bootstrap, topic) as collector,
        psycopg.connect(outbox.url) as holder,
        psycopg.connect(outbox.url, autocommit=True) as writer,
    ):
        fleet.start_connected(2)
        with writer.transaction():  # excludes the start of relays and sink from the measured time
            first = _write(writer, "first", 1)
        ledger.commit([first])
        collector.until(first.event_id, timeout=60)
        held = _write(holder, "held", 1)
        waits: list[float] = []
        numbers: dict[str, int] = {}
        for round_ in range(60):
            # Single events, and every 20 rounds a burst that makes a large window. Neither may wait for the holder.
            with writer.transaction():
                events = [
                    _write(writer, key := f"key-{n % 7}", numbers.setdefault(key, 0) + 1 + n // 7)
                    for n in range(1 if round_ % 20 else 70)
                ]
                for event in events:
                    numbers[event.key or ""] = event.number
            committed_at = time.monotonic()
            ledger.commit(events)
            collector.until_all([event.event_id for event in events], timeout=60)
            waits.append(max(collector.ids[event.event_id] for event in events) - committed_at)

        assert held.event_id not in collector.ids, "an event arrived whose transaction is still open"
        assert statistics.median(waits) < 1.0, f"half of the rounds took longer than {statistics.median(waits):.2f} s"

        holder.commit()
        ledger.commit([held])
        collector.until(held.event_id, timeout=60)
        collector.until_quiet()
        check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals)


def _write(connection: psycopg.Connection[tuple[object, ...]], key: str, number: int) -> Written:
    content = payload(key, number)
    return Written(str(emit(connection, "held.open", content, key=key)), key, number, content)
