"""Fixtures of the fault tests. Shared parts are in `support`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TopicFactory
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import PostgresServer
from mailboat_devservers.postgres_binaries import NEWEST, OLDEST
from support import refusing_sink
from support.collectors import KafkaCollector
from support.inprocess_relay import StagedSink, staged_sinks_installed
from support.kafka_consumers import PARTITIONS, Consumers
from support.lost_tail import start_primary

PROTOCOLS = {"classic": "classic", "KIP-848": "consumer"}
OrSkip = Callable[[Callable[[], PostgresServer]], PostgresServer]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which the sink ``picky`` is installed."""
    directory = tmp_path_factory.mktemp("packages")
    refusing_sink.install(directory)
    return directory


@pytest.fixture
def primary(tmp_path: Path, or_skip: OrSkip) -> PostgresServer:
    """Server that belongs to one test, see `support.lost_tail`."""
    return or_skip(lambda: start_primary(NEWEST, tmp_path / "primary"))


@pytest.fixture(params=[NEWEST, OLDEST], ids=lambda major: f"postgres{major}")
def each_primary(request: pytest.FixtureRequest, tmp_path: Path, or_skip: OrSkip) -> PostgresServer:
    """Server that belongs to one test, on the newest and on the oldest supported Postgres."""
    return or_skip(lambda: start_primary(request.param, tmp_path / "primary"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[dict[str, StagedSink]]:
    """Sinks of the kind ``STAGED`` by subscription name, available after a relay has built them."""
    with staged_sinks_installed(tmp_path) as stage:
        yield stage


@pytest.fixture
def collector(kfake: KafkaServer, kafka_topic: TopicFactory) -> Iterator[KafkaCollector]:
    """All messages of a new topic on kfake."""
    with KafkaCollector(kfake.bootstrap, kafka_topic(kfake)) as collector:
        yield collector


@pytest.fixture
def consumers(
    request: pytest.FixtureRequest, kafka_topic: Any, unique_name: Callable[[str], str], tmp_path: Path
) -> Iterator[Consumers]:
    """Consumers on kfake with claims in Valkey.

    An indirect parameter selects another store on kfake (none, bare, inbox), or Apache Kafka with a group protocol
    (classic, KIP-848).
    """
    kind = getattr(request, "param", "redis")
    server: KafkaServer = request.getfixturevalue("apache_kafka" if kind in PROTOCOLS else "kfake")
    orders = {"topic": kafka_topic(server, partitions=PARTITIONS), "group": unique_name("group")}
    if kind in PROTOCOLS:
        orders["protocol"] = PROTOCOLS[kind]
    elif kind != "inbox":
        orders["store"] = kind
    orders["redis"] = request.getfixturevalue("valkey").url
    outbox = request.getfixturevalue("outbox") if kind == "inbox" else None
    with Consumers(server, tmp_path, outbox=outbox, **orders) as consumers:
        yield consumers
