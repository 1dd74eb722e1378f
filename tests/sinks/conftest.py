"""Backends of all sinks, and servers that these tests may kill and freeze, unlike the shared ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mailboat.sinks.protocol import Sink
from mailboat_devservers.kafka import KafkaServer, start_apache_kafka, start_kfake
from mailboat_devservers.pubsub import PubSubServer
from support.sink_backends import (
    Backend,
    KafkaBackend,
    LogBackend,
    MemoryBackend,
    Opened,
    PubSubBackend,
    SharedKafkaBackend,
)

OrSkip = Callable[[Callable[[], KafkaServer]], KafkaServer]


@pytest.fixture(scope="session")
def killable_kfake(tmp_path_factory: pytest.TempPathFactory, or_skip: OrSkip) -> Iterator[KafkaServer]:
    with or_skip(lambda: start_kfake(tmp_path_factory.mktemp("kfake"))) as server:
        yield server


@pytest.fixture(scope="session")
def killable_apache_kafka(tmp_path_factory: pytest.TempPathFactory, or_skip: OrSkip) -> Iterator[KafkaServer]:
    # With the default session time-out: with a short one, a stalled machine would cost the broker its leadership. The
    # price is a slower restart after a kill.
    with or_skip(lambda: start_apache_kafka(tmp_path_factory.mktemp("apache"))) as server:
        yield server


def _backend(name: str, request: pytest.FixtureRequest) -> Backend:
    if name == "kafka-on-kfake":
        return KafkaBackend(request.getfixturevalue("killable_kfake"))
    if name == "kafka-on-apache":
        return SharedKafkaBackend(request.getfixturevalue("apache_kafka"))
    if name == "kafka-on-killable-apache":
        return KafkaBackend(request.getfixturevalue("killable_apache_kafka"))
    if name == "pubsub-on-pstest":
        server: PubSubServer = request.getfixturevalue("pubsub")
        return PubSubBackend(server)
    if name == "log":
        place: Path = request.getfixturevalue("tmp_path")
        return LogBackend(place / "events.jsonl")
    return MemoryBackend()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend that ``on_backends`` names."""
    backend = _backend(request.param, request)
    yield backend
    backend.close()


@pytest.fixture(params=["kfake", "apache_kafka"])
def kafka(request: pytest.FixtureRequest) -> Iterator[KafkaBackend]:
    """A topic with one partition, on both brokers."""
    backend = KafkaBackend(request.getfixturevalue(request.param), partitions=1)
    yield backend
    backend.close()


@pytest.fixture
def google(pubsub: PubSubServer) -> Iterator[PubSubBackend]:
    backend = PubSubBackend(pubsub)
    yield backend
    backend.close()


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    """``await opened(backend, timeout=5)`` returns an open sink, which the fixture closes."""
    sinks: list[Sink] = []

    async def open_sink(backend: Backend, **arguments: Any) -> Sink:
        sink = backend.sink(**arguments)
        sinks.append(sink)
        await sink.open()
        return sink

    yield open_sink
    for sink in sinks:
        await sink.close()
