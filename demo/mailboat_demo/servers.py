"""The servers of the demo, and the manifest of its relays, all in one temporary folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from confluent_kafka import Producer

from mailboat_devservers.errors import PartMissing
from mailboat_devservers.kafka import start_kfake
from mailboat_devservers.postgres import PostgresServer, find_postgres

TOPIC: Final = "orders"
PARTITIONS: Final = 8
SMALL_LIMIT: Final = 20_000
"""Maximum message bytes of the relays at the start. One event of the demo is larger."""
LARGE_LIMIT: Final = 900_000
_TOPIC_PARTITIONS: Final = 4

Say = Callable[[str], None]


@dataclass(slots=True)
class DemoServers:
    """Environment of the demo: database, broker and manifest."""

    folder: Path
    database_url: str
    bootstrap: str
    manifest: Path

    def limit_messages(self, limit: int) -> None:
        """Write the manifest with this limit. Relays read it when they start."""
        documents = [_relay(self.database_url), _subscription(self.bootstrap, limit)]
        self.manifest.write_text(yaml.safe_dump_all(documents, sort_keys=False))


def start_servers(stack: ExitStack, broker: str, say: Say) -> DemoServers:
    """Start the servers. The stack stops them and removes the folder."""
    folder = Path(tempfile.mkdtemp(prefix="mailboat-demo-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # the database may run as another user
    say("Starting Postgres.")
    postgres = PostgresServer.start(find_postgres(), folder / "postgres")
    stack.callback(postgres.stop, "immediate")
    bootstrap = _start_broker(stack, broker, say)
    postgres.create_database("shop")
    scene = DemoServers(folder, postgres.url("shop"), bootstrap, folder / "mailboat.yaml")
    scene.limit_messages(SMALL_LIMIT)
    return scene


def _start_broker(stack: ExitStack, broker: str, say: Say) -> str:
    if broker != "mock":
        say("Starting kfake, a Kafka-protocol broker (the first time it is built, which takes a minute).")
        try:
            server = start_kfake()
        except PartMissing as missing:
            if broker == "kfake":
                raise
            say(f"There is no kfake here: {str(missing).splitlines()[0]}")
        else:
            stack.callback(server.kill)
            server.create_topic(TOPIC, _TOPIC_PARTITIONS)
            return server.bootstrap
    say("Using librdkafka's mock cluster instead of a broker: it forgets early, so this shows and proves less.")
    return _start_mock(stack)


def _start_mock(stack: ExitStack) -> str:
    """Start librdkafka's mock cluster inside a producer of this process."""
    owner = Producer({"bootstrap.servers": "none:1", "test.mock.num.brokers": 1, "log_level": 0})
    stack.callback(owner.purge)  # the reference also keeps the producer alive until then
    metadata = owner.list_topics(TOPIC, timeout=10)  # the mock creates a topic on a metadata request
    (address,) = (f"{broker.host}:{broker.port}" for broker in metadata.brokers.values())
    return address


def _relay(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "mailboat.dev/v1alpha1",
        "kind": "OutboxRelay",
        "metadata": {"name": "shop", "namespace": "demo"},
        "spec": {"database": {"url": url}},
    }


def _subscription(bootstrap: str, limit: int) -> dict[str, Any]:
    config = {"message.max.bytes": str(limit)}
    return {
        "apiVersion": "mailboat.dev/v1alpha1",
        "kind": "EventSubscription",
        "metadata": {"name": "orders-to-kafka", "namespace": "demo"},
        "spec": {
            "relayRef": {"name": "shop"},
            "partitions": PARTITIONS,
            "filter": {"eventTypes": ["order.*"]},
            "sink": {"kafka": {"bootstrapServers": [bootstrap], "topic": TOPIC, "config": config}},
        },
    }
