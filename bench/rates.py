"""Latency and CPU at steady rates, with one and two relays, and with 1, 10 and 100 subscriptions.

Every subscription gets every event, on its own topic. Writers commit one event per transaction. The CPU time of
Postgres is that of the processes that run from begin to end of a measurement. The sessions of the writers are not
included, since their cost does not depend on the reader of the outbox (``writers`` measures it). The CPU time of the
broker includes the fetches of the measuring consumer. At rate 0 the CPU columns are milliseconds per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import latency
import psutil
from confluent_kafka import Message
from latency import Latency
from measurement import in_own_process
from setup import Relay, Stage

from mailboat_devservers.errors import ServerFailed
from mailboat_devservers.processes import Child

RATES = (0, 40, 100, 500, 1_000, 3_000)
HEADING = (
    f"  {'events/s':>8} {'relays':>6} {'subscriptions':>13} {'p50 ms':>8} {'p99 ms':>8}"
    f" {'relay':>9} {'Postgres':>9} {'broker':>9} {'RSS MiB':>8}"
)
_WARM_UP = 2.0
_PATIENCE = 120.0
_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    rate: int
    relays: int = 1
    subscriptions: int = 1


CASES = (
    *(Case(rate) for rate in RATES),
    *(Case(rate, relays=2) for rate in RATES),
    *(Case(rate, subscriptions=10) for rate in (0, 40, 100, 500)),
    *(Case(rate, subscriptions=100) for rate in (0, 40, 100)),
)
"""With 10 and 100 subscriptions the higher rates are left out: 5,000 deliveries a second and more are a drain."""
QUICK = (Case(0), Case(40), Case(100, relays=2), Case(40, subscriptions=3))


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of a time span, and resident memory at its end."""

    relay: float
    postgres: float
    broker: float
    memory: int


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one case. ``per`` is the divisor of CPU times: events, or seconds at rate 0."""

    case: Case
    latency: Latency | None
    cost: Cost
    per: float

    def __str__(self) -> str:
        waits = ["", ""] if self.latency is None else [f"{self.latency.percentile(q) * 1e3:.1f}" for q in (0.5, 0.99)]
        unit = 1e3 if self.latency is None else 1e6
        cpu = [f"{spent / self.per * unit:,.1f}" for spent in (self.cost.relay, self.cost.postgres, self.cost.broker)]
        return (
            f"  {self.case.rate:>8,} {self.case.relays:>6} {self.case.subscriptions:>13} {waits[0]:>8} {waits[1]:>8}"
            f" {cpu[0]:>9} {cpu[1]:>9} {cpu[2]:>9} {self.cost.memory / _MEBIBYTE:>8.0f}"
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Database, topics and functions that write events and read their ids."""

    url: str
    topics: Sequence[str]
    insert: latency.Insert = latency.emit
    event_id: Callable[[Message], str] = latency.event_id


def measure(stage: Stage, case: Case, seconds: float) -> Row:
    """Run relays on a fresh outbox at the rate of the case."""
    name = f"rate-{case.rate}-{case.relays}-{case.subscriptions}"
    url = stage.new_database(name.replace("-", "_"))
    topics = [stage.new_topic(f"{name}-{number}") for number in range(case.subscriptions)]
    with ExitStack() as running:
        relays = [running.enter_context(Relay(stage, url, *topics, number=number)) for number in range(case.relays)]
        until_owned(relays)
        return steady(stage, relays, Traffic(url, topics), case, seconds)


def steady(stage: Stage, relays: Sequence[Child], traffic: Traffic, case: Case, seconds: float) -> Row:
    """Measure relays, or a peer, that are ready."""
    processes = [psutil.Process(relay.pid) for relay in relays]
    if case.rate == 0:
        time.sleep(_WARM_UP)
        meter = Meter(stage, processes)
        time.sleep(seconds)
        return Row(case, None, meter.read(), seconds)
    topics = sorted({traffic.topics[0], traffic.topics[-1]})
    receiver = latency.Receiver(stage.broker.bootstrap, topics, traffic.event_id)
    warm_up = in_own_process(latency.write, traffic.url, case.rate, _WARM_UP, traffic.insert)
    meter = Meter(stage, processes)
    committed = in_own_process(latency.write, traffic.url, case.rate, seconds, traffic.insert)
    cost = meter.read()
    received = receiver.finish(warm_up.keys() | committed.keys())
    if missing := sum(event not in arrivals for arrivals in received.values() for event in committed):
        raise ServerFailed(f"{missing} of {len(committed)} events did not arrive.\n{relays[0].log_tail()}")
    delays = (arrivals[event] - at for arrivals in received.values() for event, at in committed.items())
    return Row(case, Latency(tuple(sorted(delays))), cost, len(committed))


def until_owned(relays: Sequence[Relay]) -> None:
    """Wait until the relays own all partitions, each relay its share."""
    deadline = time.perf_counter() + _PATIENCE
    while True:
        found = [relay.glance() for relay in relays]
        owned = [len(glance.owned) if glance else 0 for glance in found]
        if all(owned) and found[0] is not None and sum(owned) == found[0].partitions:
            return
        if time.perf_counter() > deadline or not all(relay.running for relay in relays):
            raise ServerFailed(f"the relays did not take all partitions.\n{relays[0].log_tail()}")
        time.sleep(0.05)


class Meter:
    """CPU time of relays, of Postgres without its writers, and of the broker, from now on."""

    def __init__(self, stage: Stage, relays: Sequence[psutil.Process]) -> None:
        self._relays = relays
        self._broker = psutil.Process(stage.broker.pid)
        self._server = psutil.Process(stage.postgres.pid)
        self._before = self._read()

    def read(self) -> Cost:
        relay, postgres, broker = (_spent(*both) for both in zip(self._before, self._read(), strict=True))
        return Cost(relay, postgres, broker, sum(process.memory_info().rss for process in self._relays))

    def _read(self) -> list[dict[int, float]]:
        server = [self._server, *self._server.children(recursive=True)]
        return [_cpu(processes) for processes in (self._relays, server, [self._broker])]


def _cpu(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """Return CPU seconds by process id."""
    found: dict[int, float] = {}
    for process in processes:
        try:
            found[process.pid] = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return found


def _spent(before: dict[int, float], now: dict[int, float]) -> float:
    return sum(now[pid] - before[pid] for pid in now.keys() & before.keys())
