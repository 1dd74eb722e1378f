"""Servers that the tests of sinks may kill and suspend (so not the shared ones), and a backend on each."""

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
def mortal_kfake(tmp_path_factory: pytest.TempPathFactory, or_skip: OrSkip) -> Iterator[KafkaServer]:
    with or_skip(lambda: start_kfake(tmp_path_factory.mktemp("kfake"))) as server:
        yield server


@pytest.fixture(scope="session")
def mortal_apache_kafka(tmp_path_factory: pytest.TempPathFactory, or_skip: OrSkip) -> Iterator[KafkaServer]:
    # Not one that counts as dead after two seconds of silence: a busy machine may keep it silent for as long, and then
    # it leads nothing for a moment. So it is back later after a kill, for which those who kill it have the time.
    with or_skip(lambda: start_apache_kafka(tmp_path_factory.mktemp("apache"))) as server:
        yield server


def _backend(name: str, request: pytest.FixtureRequest) -> Backend:
    if name == "kafka-on-kfake":
        return KafkaBackend(request.getfixturevalue("mortal_kfake"))
    if name == "kafka-on-apache":
        return SharedKafkaBackend(request.getfixturevalue("apache_kafka"))
    if name == "kafka-on-mortal-apache":
        return KafkaBackend(request.getfixturevalue("mortal_apache_kafka"))
    if name == "pubsub-on-pstest":
        server: PubSubServer = request.getfixturevalue("pubsub")
        return PubSubBackend(server)
    if name == "log":
        place: Path = request.getfixturevalue("tmp_path")
        return LogBackend(place / "events.jsonl")
    return MemoryBackend()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend that ``on_all_that`` names."""
    backend = _backend(request.param, request)
    yield backend
    backend.close()


@pytest.fixture(params=["kfake", "apache_kafka"])
def kafka(request: pytest.FixtureRequest) -> Iterator[KafkaBackend]:
    """The test runs on both brokers, on a topic of one partition."""
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
    """``await opened(backend, timeout=5)`` is an open sink that the test need not close."""
    sinks: list[Sink] = []

    async def open_sink(backend: Backend, **arguments: Any) -> Sink:
        sink = backend.sink(**arguments)
        sinks.append(sink)
        await sink.open()
        return sink

    yield open_sink
    for sink in sinks:
        await sink.close()
