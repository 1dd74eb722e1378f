"""``make playground``: Postgres, a Kafka-protocol broker, Redis, a relay, a producer and a consumer, until Ctrl-C.

    python -m mailboat_demo.playground

Unlike the demo, the playground has no scenario. The processes run until Ctrl-C, and their addresses are printed for
manual tests. All servers listen on the loopback interface. All files are in one temporary folder, which is removed at
the end.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import yaml

from mailboat_demo import orders
from mailboat_demo.relays import MAILBOAT
from mailboat_devservers.errors import PartMissing, ServerFailed
from mailboat_devservers.kafka import start_kfake
from mailboat_devservers.ports import accepts_connections, free_port
from mailboat_devservers.postgres import PostgresServer, find_postgres
from mailboat_devservers.processes import Child
from mailboat_devservers.redis_server import start_valkey

TOPICS: Final = ("orders", "orders.dead", "orders.orders-view.dead")
_ORDERS: Final = tuple(f"order-{number}" for number in range(10))
_START_TIMEOUT: Final = 240.0
"""Seconds. A start takes two on an idle machine, and up to a hundred times as long on a busy one."""
_EVERY: Final = 1.0
"""Seconds between two events of the producer."""


@dataclass(frozen=True, slots=True)
class Playground:
    """Folder and addresses of the running processes."""

    folder: Path
    database: str
    broker: str
    redis: str
    relay: str
    consumer: str

    @property
    def manifests(self) -> Path:
        return self.folder / "mailboat.yaml"

    def text(self) -> str:
        """Return the addresses and commands to try, as text for the terminal."""
        command = Path(sys.executable).with_name("mailboat")
        return f"""\
The playground is up. Ctrl-C stops and removes everything.

  Postgres    {self.database}
  Kafka       {self.broker}    topics: {", ".join(TOPICS)}
  Redis       {self.redis}
  relay       {self.relay}/    also /status and /metrics
  consumer    {self.consumer}/status    its log: {self.folder / "consumer.log"}
  manifests   {self.manifests}

A producer changes an order every second; the consumer refuses every tenth version of an order. In another terminal:

  export MAILBOAT_MANIFESTS={self.manifests}
  {command} status
  {command} emit order.placed '{{"order": "o-1", "version": 1}}' --key o-1
  {command} dlq list --subscription orders-view
"""


def documents(playground: Playground) -> list[dict[str, Any]]:
    """Return the manifests of the playground."""
    kafka = {"bootstrapServers": [playground.broker], "topic": "orders"}
    kinds: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("OutboxRelay", "shop", {"database": {"url": playground.database}}),
        (
            "EventSubscription",
            "orders-to-kafka",
            {
                "relayRef": {"name": "shop"},
                "filter": {"eventTypes": ["order.*"]},
                "sink": {"kafka": kafka},
                "delivery": {"deadLetter": {"topic": "orders.dead"}},
            },
        ),
        (
            "EventSubscription",
            "orders-view",
            {
                "source": {"kafka": kafka},
                "sink": {"pull": {}},
                "idempotency": {"redis": {"url": playground.redis}},
            },
        ),
    )
    return [
        {
            "apiVersion": "mailboat.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": "playground"},
            "spec": spec,
        }
        for kind, name, spec in kinds
    ]


def start(stack: ExitStack) -> tuple[Playground, list[Child]]:
    """Start all processes and return the addresses and the processes. The stack stops and removes all of them."""
    folder = Path(tempfile.mkdtemp(prefix="mailboat-playground-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # the database may run as another user
    _say("Starting Postgres, Kafka (kfake; the first time it is built, which takes a minute) and Redis (Valkey).")
    postgres = PostgresServer.start(find_postgres(), folder / "postgres")
    stack.callback(postgres.stop, "immediate")
    broker = start_kfake()
    stack.callback(broker.kill)
    redis = start_valkey(folder / "redis")
    stack.callback(redis.kill)
    postgres.create_database("shop")
    for topic in TOPICS:
        broker.create_topic(topic, 4)
    relay_port, consumer_port = free_port(), free_port()
    playground = Playground(
        folder,
        postgres.url("shop"),
        broker.bootstrap,
        redis.url,
        f"http://127.0.0.1:{relay_port}",
        f"http://127.0.0.1:{consumer_port}",
    )
    playground.manifests.write_text(yaml.safe_dump_all(documents(playground), sort_keys=False))
    _say("Starting the relay, the producer and the consumer.")
    relay = _mailboat(stack, playground, "relay", relay_port, "run")
    orders.await_outbox(playground.database, _START_TIMEOUT)
    orders.lay_out(playground.database, _ORDERS)
    consumer = _mailboat(
        stack, playground, "consumer", consumer_port, "consume", "mailboat_demo.playground_consumer:view"
    )
    stop = threading.Event()
    producer = threading.Thread(
        target=orders.keep_changing, args=(playground.database, _ORDERS, stop, _EVERY), name="playground-producer"
    )
    producer.start()
    stack.callback(producer.join)
    stack.callback(stop.set)
    return playground, [postgres, broker, redis, relay, consumer]


def _mailboat(stack: ExitStack, playground: Playground, name: str, port: int, *command: str) -> Child:
    arguments = [*MAILBOAT, *command, "-f", str(playground.manifests), "--listen", f"127.0.0.1:{port}"]
    child = Child(
        name,
        arguments,
        log=playground.folder / f"{name}.log",
        ready=lambda: accepts_connections(port),
        start_timeout=_START_TIMEOUT,
    )
    child.launch()
    stack.callback(child.stop)
    return child


def main() -> int:
    """Run until Ctrl-C. Exit code 0 after Ctrl-C, 1 if a part is missing or a process ended by itself."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # also if the shell started this process with SIGINT ignored
        signal.signal(ending, _interrupt)
    failure = ""
    try:
        with ExitStack() as stack:
            playground, processes = start(stack)
            _say(playground.text())
            while not (ended := [each for each in processes if not each.running]):
                time.sleep(1.0)
            failure = f"{ended[0].name} ended.\n{ended[0].log_tail()}"
    except KeyboardInterrupt:
        _say("Interrupted; everything was stopped and removed.")
        return 0
    except (PartMissing, ServerFailed) as error:
        failure = str(error)
    print(failure, file=sys.stderr)
    return 1


def _say(text: str) -> None:
    print(text, flush=True)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the removal
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
