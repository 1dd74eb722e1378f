"""Costs of a relay with 1, 10 and 100 subscriptions to one Kafka cluster: memory, threads, connections, idle CPU.

Each subscription has its own topic and delivers every event of the same outbox.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import psutil
import psycopg
from setup import PAYLOAD_BYTES, Relay, Stage, stage

import mailboat
from mailboat_devservers.errors import PartMissing, ServerFailed

_COUNTS = (1, 10, 100)
_EVENTS = 500
_INTERVAL = 0.02
_IDLE_SECONDS = 10.0
_PATIENCE = 300.0
_MEBIBYTE = 1024 * 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="subscriptions.py", description=__doc__)
    parser.add_argument("--broker", choices=("kfake", "apache"), default="kfake", help="default: kfake")
    parser.add_argument("--events", type=int, default=_EVENTS, help=f"events (default: {_EVENTS})")
    parser.add_argument("counts", type=int, nargs="*", default=_COUNTS, help="numbers of subscriptions")
    options = parser.parse_args()
    print(f"Load before the run: {os.getloadavg()[0]:.2f}. {options.events} events to each subscription.\n")
    print(f"{'':>13} {'RSS MiB':>21} {'threads':>16} {'connections':>12} {'idle CPU':>9}")
    rss, threads = f"{'idle':>6} {'after':>7} {'peak':>6}", f"{'all':>7} {'Kafka':>8}"
    print(f"{'subscriptions':>13} {rss} {threads} {'to Kafka':>12} {'ms/s':>9}")
    try:
        with stage(options.broker) as servers:
            for count in options.counts:
                _measure(servers, count, options.events)
    except (PartMissing, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _measure(servers: Stage, count: int, events: int) -> None:
    url = servers.new_database(f"subscriptions_{count}")
    topics = [servers.new_topic(f"topic-{count}-{number}") for number in range(count)]
    with Relay(servers, url, *topics) as relay:
        relay.until_ready(_PATIENCE)
        process = psutil.Process(relay.pid)
        idle_cpu = _idle_cpu(process)
        idle = process.memory_info().rss
        _emit(url, events)
        _until_published(relay, events * count)
        rss, peak = process.memory_info().rss, relay.peak_memory()
        tasks = [task.read_text() for task in Path(f"/proc/{relay.pid}/task").glob("*/comm")]
        clients = sum(name.startswith("rdk:") for name in tasks)
        port = int(servers.broker.bootstrap.rpartition(":")[2])
        connections = sum(c.raddr.port == port for c in process.net_connections("tcp") if c.raddr)
    print(
        f"{count:>13} {idle / _MEBIBYTE:>6.0f} {rss / _MEBIBYTE:>7.0f} {peak / _MEBIBYTE:>6.0f} {len(tasks):>7}"
        f" {clients:>8} {connections:>12} {idle_cpu * 1000:>9.1f}",
        flush=True,
    )


def _idle_cpu(process: psutil.Process) -> float:
    """Return CPU seconds per second without events."""
    time.sleep(3)  # skips the start-up
    before = sum(process.cpu_times()[:2])
    time.sleep(_IDLE_SECONDS)
    return float(sum(process.cpu_times()[:2]) - before) / _IDLE_SECONDS


def _emit(url: str, events: int) -> None:
    with psycopg.connect(url) as connection:
        for number in range(events):
            mailboat.emit(connection, "order.placed", b"x" * PAYLOAD_BYTES, key=f"order-{number % 100}")
            connection.commit()
            time.sleep(_INTERVAL)


def _until_published(relay: Relay, deliveries: int) -> None:
    deadline = time.perf_counter() + _PATIENCE
    while (glance := relay.glance()) is None or glance.published < deliveries:
        if not relay.running or time.perf_counter() > deadline:
            raise ServerFailed(f"the relay did not deliver everything.\n{relay.log_tail()}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
