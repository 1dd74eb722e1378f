"""Base of all measurements: one Postgres, one broker, one outbox with a backlog, and the manifest of a relay.

The servers are those of the tests (`mailboat_devservers`), with the durability of the database on. Without flushes, all
figures would be too good.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import psycopg
import yaml
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from mailboat.store.schema.migrate import apply_migrations
from mailboat_demo.relays import RelayProcess
from mailboat_devservers.errors import ServerFailed
from mailboat_devservers.kafka import KafkaServer, start_apache_kafka, start_kfake
from mailboat_devservers.postgres import PostgresServer, find_postgres

OUTBOX = "mailboat.outbox"
TOPIC_PARTITIONS = 4
PAYLOAD_BYTES = 200
KEYS = 10_000

_BACKLOG = """
insert into mailboat.outbox (event_type, aggregate_type, aggregate_id, key, payload)
select 'order.placed', 'order', 'order-' || n %% %(keys)s, 'order-' || n %% %(keys)s,
       convert_to(rpad('{"order":' || n || ',"note":"', %(bytes)s::integer - 2, 'x') || '"}', 'UTF8')
from generate_series(%(first)s::bigint, %(last)s::bigint) as n
"""
_ROWS_PER_TRANSACTION = 10_000
_POLL = 0.02
_NOT_YET = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TIMED_OUT)
"""Errors of a topic that was just created, or of a broker that is too busy to answer."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The servers of one run."""

    folder: Path
    postgres: PostgresServer
    broker: KafkaServer

    def new_database(self, name: str) -> str:
        """Create a migrated database and return its URL."""
        self.postgres.create_database(name)
        url = self.postgres.url(name)
        asyncio.run(_migrate(url))
        return url

    def new_topic(self, name: str) -> str:
        self.broker.create_topic(name, TOPIC_PARTITIONS)
        return name


@contextmanager
def stage(broker: str, postgres_settings: Mapping[str, str] | None = None) -> Iterator[Stage]:
    """Start all servers, and stop them at the end."""
    with tempfile.TemporaryDirectory(prefix="mailboat-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the database may run as another user
        settings = {"shared_buffers": "256MB", "max_wal_size": "4GB", "checkpoint_timeout": "30min"}
        settings.update(postgres_settings or {})
        with (
            PostgresServer.start(find_postgres(), folder / "postgres", settings=settings) as postgres,
            # In memory: a broker that flushes each write to the same disk would dominate the measurement.
            start_apache_kafka(folder / "broker") if broker == "apache" else start_kfake() as server,
        ):
            yield Stage(folder, postgres, server)


async def _migrate(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await apply_migrations(connection, OUTBOX)


def fill(url: str, events: int, keys: int = KEYS) -> None:
    """Write a backlog in many transactions, with statistics and hint bits as in an outbox in use."""
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(1, events + 1, _ROWS_PER_TRANSACTION):
            last = min(first + _ROWS_PER_TRANSACTION - 1, events)
            connection.execute(_BACKLOG, {"keys": keys, "bytes": PAYLOAD_BYTES, "first": first, "last": last})
        connection.execute("vacuum analyze mailboat.outbox")
        connection.execute("checkpoint")


class Moment(NamedTuple):
    """Bounds of the time of an event: not yet at ``before``, observed at ``seen``."""

    before: float
    seen: float


class Watermarks:
    """Number of messages in a topic, queried from the broker."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "log_level": 0})
        self._partitions = [TopicPartition(topic, number) for number in range(TOPIC_PARTITIONS)]

    def total(self) -> int:
        return sum(self._consumer.get_watermark_offsets(p, timeout=60)[1] for p in self._partitions)

    def _so_far(self) -> int:
        """Return the total, or 0 after a temporary error, for repeated queries."""
        try:
            return self.total()
        except KafkaException as error:
            if error.args[0].code() in _NOT_YET:
                return 0
            raise

    def wait_for(self, messages: int, timeout: float) -> Moment:
        """Wait until the topic holds that many messages."""
        began = before = time.perf_counter()
        while self._so_far() < messages:
            before = time.perf_counter()
            if before - began > timeout:
                raise TimeoutError(f"the topic did not come to hold {messages} messages within {timeout:.0f} s")
            time.sleep(_POLL)
        return Moment(before, time.perf_counter())

    def close(self) -> None:
        self._consumer.close()


class Relay(RelayProcess):
    """Relay with one subscription per topic, and defaults for everything else."""

    def __init__(self, stage: Stage, url: str, *topics: str, notify: str = "Auto", number: int = 0) -> None:
        """``number`` distinguishes relays of the same subscriptions."""
        manifest = stage.folder / f"{topics[0]}.yaml"
        manifest.write_text(_manifests(url, stage.broker.bootstrap, topics, notify))
        super().__init__(f"relay-{topics[0]}-{number}", manifest, stage.folder)

    def __enter__(self) -> Self:
        self.launch()
        return self

    def until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the relay is connected and owns its partitions."""
        deadline = time.perf_counter() + timeout
        while (glance := self.glance()) is None or not glance.owns_all:
            if not self.running or time.perf_counter() > deadline:
                raise ServerFailed(f"the relay did not get to work.\n{self.log_tail()}")
            time.sleep(_POLL)

    def peak_memory(self) -> int:
        """Return the peak resident memory in bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _manifests(url: str, bootstrap: str, topics: Sequence[str], notify: str) -> str:
    relay = {
        "apiVersion": "mailboat.dev/v1alpha1",
        "kind": "OutboxRelay",
        "metadata": {"name": "bench", "namespace": "bench"},
        "spec": {"database": {"url": url}, "wake": {"notify": notify}},
    }
    subscriptions = [
        {
            "apiVersion": "mailboat.dev/v1alpha1",
            "kind": "EventSubscription",
            "metadata": {"name": topic, "namespace": "bench"},
            "spec": {
                "relayRef": {"name": "bench"},
                "sink": {"kafka": {"bootstrapServers": [bootstrap], "topic": topic}},
            },
        }
        for topic in topics
    ]
    return yaml.safe_dump_all([relay, *subscriptions])
