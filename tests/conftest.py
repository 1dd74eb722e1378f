"""Fixtures of all tests: real servers, unique names, and the rules that every test has to keep.

- If a real server can't be installed here, the tests that need it are skipped, and the run ends with a list of the
  missing parts. In CI (``CI=true``) these tests fail instead.
- A test that leaves an asyncio task or a thread behind fails.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from mailboat_devservers.errors import PartMissing
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database, PostgresServer
from mailboat_devservers.postgres_binaries import NEWEST, OLDEST
from mailboat_devservers.proxy import Proxy
from mailboat_devservers.pubsub import PubSubServer
from mailboat_devservers.redis_server import RedisServer
from support.databases import migrated_database
from support.shared_servers import SOCKET, Servers, SharedServers, SharedServersOfController
from support.wait import until_midnight_is_over, wait_until

Part = TypeVar("Part")

_MISSING = "a real part is missing: "

# No deadline: the duration of an example means nothing while other tests run on the same machine. Derandomized: a
# failure is reproducible on every machine.
settings.register_profile("patient", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


# ---- real servers, one set for all workers -------------------------------------------------------------------------


def part_or_skip(start: Callable[[], Part]) -> Part:
    """Start a part. If the part is missing, skip the test on a developer's machine and fail it in CI."""
    try:
        return start()
    except PartMissing as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(_MISSING + str(missing), pytrace=False)
        pytest.skip(_MISSING + str(missing))


@pytest.fixture(scope="session", name="or_skip")
def or_skip_fixture() -> Callable[[Callable[[], Part]], Part]:
    """``or_skip(start_kfake)`` starts a server for one test, and skips or fails the test like ``part_or_skip``."""
    return part_or_skip


def pytest_configure(config: pytest.Config) -> None:
    # The xdist controller owns the servers of its workers. Their folder is removed when the controller ends.
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="mailboat-servers-")
        config.add_cleanup(folder.cleanup)
        Path(folder.name).chmod(0o755)  # if the tests run as root, Postgres runs as another user
        servers = SharedServers(Path(folder.name))
        servers.serve_workers()
        config.add_cleanup(servers.stop)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = SharedServersOfController() if SOCKET in os.environ else SharedServers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def postgres(servers: Servers) -> PostgresServer:
    """Postgres, the newest major. Shared: to stop the server or to change its settings, start a separate one."""
    return part_or_skip(lambda: servers.postgres(NEWEST))


@pytest.fixture(scope="session")
def postgres14(servers: Servers) -> PostgresServer:
    """Postgres, the oldest supported major. Shared like ``postgres``."""
    return part_or_skip(lambda: servers.postgres(OLDEST))


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    """A fresh, empty database on the newest Postgres."""
    yield from _fresh_database(postgres)


@pytest.fixture(params=["postgres", "postgres14"])
def each_database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database. The test runs twice: on the newest and on the oldest supported Postgres."""
    yield from _fresh_database(request.getfixturevalue(request.param))


@pytest.fixture
def outbox(postgres: PostgresServer) -> Iterator[Database]:
    """A fresh database with an outbox, on the newest Postgres."""
    yield from migrated_database(postgres)


@pytest.fixture(params=["postgres", "postgres14"])
def each_outbox(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database with an outbox, on the newest Postgres and, in ``make verify``, on the oldest supported one."""
    yield from migrated_database(request.getfixturevalue(request.param))


def _fresh_database(server: PostgresServer) -> Iterator[Database]:
    until_midnight_is_over()
    name = f"test_{secrets.token_hex(6)}"
    server.create_database(name, template="template0")
    yield Database(server, name)
    server.drop_database(name)


@pytest.fixture(scope="session")
def kfake(servers: Servers) -> KafkaServer:
    """The light Kafka-protocol broker, in memory. Shared: to kill a broker, start a separate one."""
    return part_or_skip(lambda: servers.kfake())


@pytest.fixture(scope="session")
def apache_kafka(servers: Servers) -> KafkaServer:
    """Apache Kafka. Shared: to kill a broker, start a separate one."""
    return part_or_skip(lambda: servers.kafka())


@pytest.fixture(scope="session")
def pubsub(servers: Servers) -> PubSubServer:
    """Google's Pub/Sub fake. Shared: to kill a server, start a separate one."""
    return part_or_skip(lambda: servers.pubsub())


@pytest.fixture(scope="session")
def valkey(servers: Servers) -> RedisServer:
    """Valkey. Shared: use keys of a unique consumer and never flush. To kill a server, start a separate one."""
    return part_or_skip(lambda: servers.redis("valkey"))


@pytest.fixture(scope="session", params=["valkey", "redis"])
def each_redis(request: pytest.FixtureRequest, servers: Servers) -> RedisServer:
    """Valkey and Redis 7, shared like ``valkey``. The test runs twice, once on each."""
    return part_or_skip(lambda: servers.redis(request.param))


# ---- fresh names, topics and proxies ------------------------------------------------------------------------------


@pytest.fixture
def unique_name() -> Callable[[str], str]:
    """``unique_name("orders")`` returns a name that is unique on the shared servers."""
    return lambda stem: f"{stem}-{secrets.token_hex(4)}"


class TopicFactory(Protocol):
    def __call__(self, server: KafkaServer, partitions: int = 4, config: Mapping[str, str] | None = None) -> str: ...


@pytest.fixture
def kafka_topic(unique_name: Callable[[str], str]) -> TopicFactory:
    """``kafka_topic(kfake, partitions=4)`` creates a topic and returns its name."""

    def create(server: KafkaServer, partitions: int = 4, config: Mapping[str, str] | None = None) -> str:
        name = unique_name("topic")
        server.create_topic(name, partitions, config)
        return name

    return create


@pytest.fixture
def proxy_factory() -> Iterator[Callable[[int], Proxy]]:
    """``proxy_factory(postgres.port)`` starts a proxy in front of that port. The proxy is closed after the test."""
    proxies: list[Proxy] = []

    def create(port: int) -> Proxy:
        proxies.append(Proxy("127.0.0.1", port))
        return proxies[-1]

    yield create
    for proxy in proxies:
        proxy.close()


# ---- rules --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield

    def leftovers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if not thread.daemon and thread not in before]

    if leftovers():  # a thread that was asked to stop may need a moment
        wait_until(lambda: not leftovers(), timeout=30, what=f"the threads that the test left behind: {leftovers()}")


@pytest_asyncio.fixture
async def no_task_left_behind() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    leftovers = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not leftovers, f"the test left tasks behind: {leftovers}"


_OLDEST_IN_GATE = ("tests/schema/", "tests/store/conformance/test_windows.py", "tests/cli/test_schema_commands.py")
"""Tests that depend on the major: schema, verify, migrate, windows. On the oldest one, others run with ``verify``."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        on_oldest = {f"postgres{OLDEST}", OLDEST} & {
            v for v in item.callspec.params.values() if isinstance(v, str | int)
        }
        if on_oldest and not item.nodeid.startswith(_OLDEST_IN_GATE):
            item.add_marker(pytest.mark.verify)
    # Only tests with an event loop have the task rule. The rule is set up right after the thread rule, so that the loop
    # is closed before threads are counted. All other fixtures are set up later, so that their tasks have ended before
    # tasks are counted.
    if isinstance(item, pytest.Function) and item.get_closest_marker("asyncio") is not None:
        item.fixturenames.insert(item.fixturenames.index("no_thread_left_behind") + 1, "no_task_left_behind")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple) and _MISSING in report.longrepr[2]:
            part = report.longrepr[2].split(_MISSING, 1)[1].splitlines()[0]
            missing[part] = missing.get(part, 0) + 1
    if missing:
        terminalreporter.section("real parts that were missing", red=True, bold=True)
        for part, tests in missing.items():
            terminalreporter.line(f"{tests} {'test' if tests == 1 else 'tests'} did not run: {part}")
