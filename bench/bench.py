"""`make bench`: the relay against a bare pipe and a plain loop, in one run, on the same servers.

The program prints tables and the goals that were met. The figures are no test: speed and load of the machine vary.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import consume
import faststream_peer
import held_snapshot
import pull
import rates
import writers
from claim_loop import claim_loop
from drain import drain
from latency import Latency
from measurement import Measured, in_own_process
from pipe import bare_pipe, produce_alone, read_alone
from setup import Stage, fill, stage

from mailboat_devservers.errors import PartMissing, ServerFailed
from mailboat_devservers.redis_server import start_valkey

MEBIBYTE = 1024 * 1024
_PLAIN = 50
_OTHER_PLAIN = (1, 500)
"""Rows that the plain loop claims per round."""
_BUSY = 0.5
"""Processes per core that wait to run before the start. Above this value, figures have little meaning."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Amounts that are measured."""

    events: int
    plain_rounds: int
    """Rounds of the plain loop. Its speed does not depend on the duration of the run."""
    latency_seconds: float
    writer_transactions: int
    """Transactions per connection and round."""
    writer_rounds: int
    cases: Sequence[rates.Case] = rates.CASES


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise and its measured result."""

    text: str
    measured: str
    met: bool


def main() -> int:
    options = _options()
    extent = Extent(options.events or 500_000, 400, 20.0, 1_500, 3)
    if options.quick:
        extent = Extent(options.events or 50_000, 40, 5.0, 100, 1, rates.QUICK)
    busy = describe_machine(options.broker)
    try:
        with stage(options.broker) as servers:
            goals = [goal for name in options.only or SECTIONS for goal in SECTIONS[name](servers, extent)]
    except (PartMissing, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    print("\nGoals")
    for goal in goals:
        print(f"  {'met     ' if goal.met else 'NOT MET '} {goal.text:<48} {goal.measured}")
    if busy:
        print("The machine was busy with other things: measure again on an idle one before you believe this.")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure the relay against a bare pipe.")
    parser.add_argument("--events", type=int, help="size of the backlog (default: 500000; with --quick 50000)")
    parser.add_argument("--broker", choices=("kfake", "apache"), default="kfake", help="default: kfake")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one table; may be repeated (default: all)")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, to see that it works")
    return parser.parse_args()


def describe_machine(broker: str) -> bool:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores,", end=" ")
    print(f"broker: {'Apache Kafka' if broker == 'apache' else 'kfake, in memory'}")
    print(f"Load before the run: {load:.2f} ({load / cores:.2f} per core)")
    return load / cores > _BUSY


def _throughput(servers: Stage, extent: Extent) -> list[Goal]:
    url, bootstrap, events = servers.new_database("bench"), servers.broker.bootstrap, extent.events
    began = time.perf_counter()
    fill(url, events)
    print(f"\nBacklog: {events:,} events of 200 bytes, written in {time.perf_counter() - began:.0f} s\n")
    print(f"  {'':<48} {'events/s':>10} {'CPU µs/event':>13} {'peak MiB':>9}")
    _row("(a) reading alone", in_own_process(read_alone, url))
    _row("(b) producing alone", in_own_process(produce_alone, url, bootstrap, servers.new_topic("produce"), events))
    pipe = in_own_process(bare_pipe, url, bootstrap, servers.new_topic("pipe"))
    _row("(c) a bare pipe of both, no bookkeeping", pipe)
    drained = drain(servers, url, servers.new_topic("relay"), events)
    relay = drained.delivery
    _row("(d) the relay", relay)
    loops = {}
    for at_once in (_PLAIN, *_OTHER_PLAIN):
        some = min(at_once * extent.plain_rounds, events)
        topic = servers.new_topic(f"plain{at_once}")
        loops[at_once] = in_own_process(claim_loop, url, bootstrap, topic, some, at_once)
        name = "(e) a plain loop, SKIP LOCKED, " if at_once == _PLAIN else "    the same, "
        _row(f"{name}{at_once} at a time ({loops[at_once].events:,})", loops[at_once])
    plain, single = loops[_PLAIN], loops[1]
    if drained.received != events:
        print(f"  The broker got {drained.received - events:+,} messages more than there were events.")
    return [
        Goal("the relay reaches half of the bare pipe", f"{relay.rate / pipe.rate:.2f}", relay.rate >= pipe.rate / 2),
        Goal(
            "and ten times the plain loop",
            f"{relay.rate / plain.rate:.1f} (the bare pipe itself: {pipe.rate / plain.rate:.1f})",
            relay.rate >= plain.rate * 10,
        ),
        Goal("ten times one that takes row by row", f"{relay.rate / single.rate:.1f}", relay.rate >= single.rate * 10),
        Goal("in less than 120 MiB", f"{(relay.memory or 0) / MEBIBYTE:.0f} MiB", (relay.memory or 0) < 120 * MEBIBYTE),
    ]


def _rates(servers: Stage, extent: Extent) -> list[Goal]:
    print(f"\nSteady rates, {extent.latency_seconds:.0f} s each; CPU in µs per event, at rate 0 in ms per second\n")
    print(rates.HEADING)
    found: dict[rates.Case, Latency] = {}
    for case in extent.cases:
        row = rates.measure(servers, case, extent.latency_seconds)
        print(row, flush=True)
        if row.latency is not None:
            found[case] = row.latency
    chosen = rates.Case(500) if rates.Case(500) in found else next(iter(found))
    p50, p99 = (found[chosen].percentile(share) * 1000 for share in (0.5, 0.99))
    return [
        Goal(f"{chosen.rate} events/s: p50 below 10 ms", f"{p50:.1f} ms", p50 < 10),
        Goal(f"{chosen.rate} events/s: p99 below 50 ms", f"{p99:.1f} ms", p99 < 50),
    ]


def _writers(servers: Stage, extent: Extent) -> list[Goal]:
    print(f"\nWriters: {writers.CONNECTIONS} connections, one event per commit; CPU of their sessions\n")
    print(f"  {'':<36} {'commits/s':>10} {'of plain':>9} {'CPU µs':>8} {'of plain':>9}")
    found = {row.name: row for row in writers.measure(servers, extent.writer_transactions, extent.writer_rounds)}
    plain = found[writers.PLAIN]
    for row in found.values():
        shares = f"{row.rate / plain.rate:>9.2f} {row.cpu:>8.0f} {row.cpu / plain.cpu:>9.2f}"
        print(f"  {row.name:<36} {row.rate:>10,.0f} {shares}", flush=True)
    kept = found[writers.OUTBOX].rate / plain.rate
    return [Goal("writers keep 85 % of a plain table's commit rate", f"{kept:.0%}", kept >= 0.85)]


def _held_snapshot(servers: Stage, extent: Extent) -> list[Goal]:
    """Measure beside a snapshot that is held."""
    versions = held_snapshot.VERSIONS if extent.cases is rates.CASES else held_snapshot.VERSIONS // 10
    print(f"\nA held snapshot and {versions:,} versions per cursor, {held_snapshot.RATE} events/s\n")
    print(f"  {'':<36} {'p50 ms':>8} {'p99 ms':>8} {'insert ms':>10} {'Postgres CPU µs':>16}")
    names = ("without it", "with it", "with it, leases renewed")
    found = []
    for name, row in zip(names, held_snapshot.measure(servers, extent.latency_seconds, versions), strict=True):
        print(
            f"  {name:<36} {row.p50:>8.1f} {row.p99:>8.1f} {row.insert:>10.2f} {row.postgres_cpu:>16,.0f}", flush=True
        )
        found.append(row)
    fresh, _, renewed = found
    latency, insert = renewed.p50 / fresh.p50, renewed.insert / fresh.insert
    return [
        Goal("a held snapshot at most doubles p50", f"{latency:.2f}", latency <= 2),
        Goal("and the duration of an insert", f"{insert:.2f}", insert <= 2),
    ]


def _consumers(servers: Stage, extent: Extent) -> list[Goal]:
    """Measure handlers without a broker."""
    url, some = servers.new_database("consumers"), extent.events // 5
    fill(url, some)
    grouped = servers.new_database("groups")
    pull.fill_groups(grouped, some // 4, 100)
    print(f"\n  {'Consumers without a broker, one process':<48} {'events/s':>10} {'CPU µs/event':>13} {'peak MiB':>9}")
    hundred = in_own_process(pull.pull, url, some * 9 // 10, 100, False)
    _row("(f) pull, empty handler, 100 at a time", hundred)
    _row("    the same, 1 at a time", in_own_process(pull.pull, url, some // 100, 1, False))
    thousand = servers.new_database("failing")
    fill(thousand, some, keys=1_000)
    healthy, beside = in_own_process(pull.pull_beside_a_failing_key, thousand, some * 9 // 10)
    _row("    the same with 1,000 keys", healthy)
    _row("    the others while one of them always fails", beside)
    _row("    groups of 100", in_own_process(pull.pull, grouped, some // 10, 100, True))
    _row("(g) a plain queue table, 100 at a time", in_own_process(pull.take_from_plain_queue, url, some // 2, 100))
    _row("    the same, 1 at a time", in_own_process(pull.take_from_plain_queue, url, some // 100, 1))
    found = in_own_process(pull.commit_to_effect, url, 100, extent.latency_seconds)
    p50, p99 = found.percentile(0.5), found.percentile(0.99)
    print(f"\n  From commit to effect at 100 events/s: p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms")
    kept = beside.rate / healthy.rate
    return [
        Goal("a consumer handles 20,000 events/s, 100 at a time", f"{hundred.rate:,.0f}", hundred.rate >= 20_000),
        Goal("beside a key that always fails, 90 % of that", f"{kept:.0%}", kept >= 0.9),
    ]


def _behind_kafka(servers: Stage, extent: Extent) -> list[Goal]:
    """Measure handlers behind a broker."""
    bootstrap, topic, events = servers.broker.bootstrap, servers.new_topic("consumers"), extent.events
    consume.fill_topic(bootstrap, topic, events)
    print(f"\n  {'Consumers behind Kafka, one process':<48} {'events/s':>10} {'CPU µs/event':>13} {'peak MiB':>9}")
    plain = in_own_process(consume.consume, bootstrap, topic, events, None, 32)
    _row("(h) empty handler, no idempotency", plain)
    with start_valkey() as valkey:
        claimed = in_own_process(consume.consume, bootstrap, topic, events, valkey.url, 64)
        _row("    the same with claims in Redis", claimed)
        bare = in_own_process(consume.consume_with_bare_keys, bootstrap, topic, events // 10, valkey.url)
        _row("(i) a plain loop, SET NX awaited per event", bare)
    goals = [
        Goal("behind Kafka, 50,000 events/s without claims", f"{plain.rate:,.0f}", plain.rate >= 50_000),
        Goal("and 25,000 events/s with claims in Redis", f"{claimed.rate:,.0f}", claimed.rate >= 25_000),
    ]
    print(f"      claims: {claimed.rate / bare.rate:.1f} times the plain loop, {_less(bare, claimed)}")
    try:
        with faststream_peer.installed() as folder:
            peer = faststream_peer.consume(folder, bootstrap, topic, events // 25)
    except faststream_peer.LeftOut as reason:
        print(f"  (j) FastStream, empty handler: left out: {reason}")
        return goals
    _row("(j) FastStream, empty handler, no idempotency", peer)
    print(f"      Mailboat: {plain.rate / peer.rate:.1f} times its rate, {_less(peer, plain)}")
    ratio = plain.rate / peer.rate
    return [*goals, Goal("and 20 times FastStream", f"{ratio:.1f}", ratio >= 20)]


def _less(other: Measured, ours: Measured) -> str:
    return f"{other.cpu_per_event / ours.cpu_per_event:.1f} times less CPU per event"


SECTIONS: dict[str, Callable[[Stage, Extent], list[Goal]]] = {
    "drain": _throughput,
    "rates": _rates,
    "writers": _writers,
    "snapshot": _held_snapshot,
    "pull": _consumers,
    "broker": _behind_kafka,
}


def _row(name: str, found: Measured) -> None:
    memory = f"{found.memory / MEBIBYTE:.0f}" if found.memory else ""
    print(f"  {name:<48} {found.rate:>10,.0f} {found.cpu_per_event:>13.1f} {memory:>9}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
