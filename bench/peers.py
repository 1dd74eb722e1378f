"""`make bench-peers`: Debezium and watermill-sql beside the relay, with the same backlog and rates, on one server.

Debezium reads the write-ahead log, so Postgres runs with ``wal_level = logical`` for all. A peer that can't run is left
out, and the reason is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import debezium_engine
import latency
import psutil
import psycopg
import rates
import watermill_forwarder
from drain import drain
from measurement import Measured
from rates import Case, Row, Traffic
from setup import Stage, Watermarks, fill, stage

from bench import describe_machine
from mailboat_devservers.errors import PartMissing, ServerFailed

_RATES = (0, 100, 500, 1_000, 3_000)
_QUICK_RATES = (0, 40)
_SETTINGS = {"wal_level": "logical", "max_replication_slots": "20", "max_wal_senders": "20"}
_SERVER = "Debezium Server"
_NO_SERVER = "its distribution has 782 MB and needs Java 21"

_PATIENCE = 600.0

Measure = Callable[[Stage, Case, float], Row]


def debezium(servers: Stage, case: Case, seconds: float) -> Row:
    """Run Debezium's embedded engine on a table in the layout of its outbox router."""
    name = f"debezium-{case.rate}"
    servers.postgres.create_database(database := name.replace("-", "_"))
    url, topic = servers.postgres.url(database), servers.new_topic(name)
    debezium_engine.create_table(url)
    with debezium_engine.start(servers, url) as engine:
        insert, event_id = partial(debezium_engine.insert, topic), partial(latency.event_id, header="id")
        return rates.steady(servers, [engine], Traffic(url, [topic], insert, event_id), case, seconds)


def drain_debezium(servers: Stage, events: int, per_transaction: int) -> Measured:
    """Let Debezium's embedded engine drain a backlog that was written while it was suspended."""
    name = f"debezium-drain-{per_transaction}"
    servers.postgres.create_database(database := name.replace("-", "_"))
    url, topic = servers.postgres.url(database), servers.new_topic(name)
    debezium_engine.create_table(url)
    marks = Watermarks(servers.broker.bootstrap, topic)
    with debezium_engine.start(servers, url) as engine, psycopg.connect(url) as connection:
        debezium_engine.insert(topic, connection, "first")
        connection.commit()
        marks.wait_for(1, _PATIENCE)
        process = psutil.Process(engine.pid)
        process.suspend()
        try:
            debezium_engine.fill(url, topic, events, per_transaction)
        finally:
            process.resume()
        began, cpu = marks.wait_for(2, _PATIENCE), sum(process.cpu_times()[:2])
        ended = marks.wait_for(events + 1, _PATIENCE)
        spent = sum(process.cpu_times()[:2]) - cpu
    marks.close()
    return Measured(events, ended.seen - began.before, spent)


def watermill(servers: Stage, case: Case, seconds: float) -> Row:
    """Run a forwarder of Watermill's SQL Pub/Sub on its own table."""
    servers.postgres.create_database(name := f"watermill_{case.rate}")
    url, topic = servers.postgres.url(name), servers.new_topic(name)
    with watermill_forwarder.start(servers, url, topic) as forwarder:
        insert = partial(watermill_forwarder.insert, topic)
        event_id = partial(latency.event_id, header=watermill_forwarder.ID_HEADER)
        return rates.steady(servers, [forwarder], Traffic(url, [topic], insert, event_id), case, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="peers.py", description=__doc__)
    parser.add_argument("--broker", choices=("kfake", "apache"), default="apache", help="default: apache")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement (default: 20)")
    parser.add_argument("--quick", action="store_true", help="two rates of 5 seconds, to see that it works")
    parser.add_argument("--drain", action="store_true", help="only the table of drains")
    parser.add_argument("--events", type=int, default=100_000, help="size of the backlog (default: 100000)")
    options = parser.parse_args()
    busy = describe_machine(options.broker)
    chosen, seconds = (_QUICK_RATES, 5.0) if options.quick else (_RATES, options.seconds)
    try:
        with stage(options.broker, _SETTINGS) as servers:
            if options.drain or not options.quick:
                _print_drains(servers, options.events)
            if not options.drain:
                _print_table(servers, chosen, seconds)
    except (PartMissing, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    if busy:
        print("The machine was busy with other things: measure again on an idle one before you believe this.")
    return 0


def _print_drains(servers: Stage, events: int) -> None:
    print(f"\nBacklog of {events:,} events of 200 bytes\n")
    print(f"  {'':<48} {'events/s':>10} {'CPU µs/event':>13}")
    url = servers.new_database("drain")
    fill(url, events)
    rows: dict[str, Callable[[], Measured]] = {
        "Mailboat": lambda: drain(servers, url, servers.new_topic("drain"), events).delivery
    }
    try:
        debezium_engine.program()
        for per_transaction in (100, 1):
            name = f"{debezium_engine.NAME}, rows per transaction: {per_transaction}"
            rows[name] = partial(drain_debezium, servers, events, per_transaction)
    except PartMissing as missing:
        print(f"Left out: {debezium_engine.NAME}: {missing}")
    for name, measure in rows.items():
        found = measure()
        print(f"  {name:<48} {found.rate:>10,.0f} {found.cpu_per_event:>13.1f}", flush=True)


def _print_table(servers: Stage, chosen: tuple[int, ...], seconds: float) -> None:
    left_out = {_SERVER: _NO_SERVER}
    measures: dict[str, Measure] = {"Mailboat": rates.measure}
    peers: list[tuple[str, Callable[[], object], Measure]] = [
        (debezium_engine.NAME, debezium_engine.program, debezium),
        (watermill_forwarder.NAME, watermill_forwarder.program, watermill),
    ]
    for name, program, measure in peers:
        try:
            program()
            measures[name] = measure
        except PartMissing as missing:
            left_out[name] = str(missing)
    print(f"\n{seconds:.0f} s each; CPU in µs per event, at rate 0 in ms per second\n")
    print(f"  {'':<26}{rates.HEADING}")
    for rate in chosen:
        for name, measure in list(measures.items()):
            try:
                print(f"  {name:<26}{measure(servers, Case(rate), seconds)}", flush=True)
            except ServerFailed as failure:
                del measures[name]
                left_out[name] = f"it failed at {rate} events/s: {failure}"
    for name, reason in left_out.items():
        print(f"Left out: {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
