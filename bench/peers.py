"""`make bench-peers`: Debezium and watermill-sql beside the relay, at the same rates, in one run on the same servers.

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
import rates
import watermill_forwarder
from rates import Case, Row, Traffic
from setup import Stage, stage

from bench import describe_machine
from mailboat_devservers.errors import PartMissing, ServerFailed

_RATES = (0, 100, 500, 1_000, 3_000)
_QUICK_RATES = (0, 40)
_SETTINGS = {"wal_level": "logical", "max_replication_slots": "20", "max_wal_senders": "20"}
_SERVER = "Debezium Server"
_NO_SERVER = "its distribution has 782 MB and needs Java 21"

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
    options = parser.parse_args()
    busy = describe_machine(options.broker)
    chosen, seconds = (_QUICK_RATES, 5.0) if options.quick else (_RATES, options.seconds)
    try:
        with stage(options.broker, _SETTINGS) as servers:
            _print_table(servers, chosen, seconds)
    except (PartMissing, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    if busy:
        print("The machine was busy with other things: measure again on an idle one before you believe this.")
    return 0


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
