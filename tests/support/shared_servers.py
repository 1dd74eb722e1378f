"""One set of servers for all workers of a test run.

The controller of pytest-xdist starts a server at the first request of a worker, and owns its process. Workers get the
port over a Unix socket, and a handle that can connect but not stop the server. Without workers, the process that runs
the tests has both roles.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import cast

from mailboat_devservers.errors import PartMissing
from mailboat_devservers.golang import built_program
from mailboat_devservers.kafka import KafkaServer, start_apache_kafka, start_kfake
from mailboat_devservers.postgres import PostgresServer, find_postgres
from mailboat_devservers.processes import OURSELVES, Child
from mailboat_devservers.pubsub import PubSubServer, start_pstest
from mailboat_devservers.redis_server import RedisServer, start_redis, start_valkey

SOCKET = "MAILBOAT_TEST_SERVERS"
"""Environment variable: the name of the socket of the process that owns the servers."""

# Tests never crash the shared servers. Without fsync, databases are copied much faster.
# No autovacuum: some tests count transactions of a database.
_POSTGRES = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off", "max_connections": "500"}

_START: dict[str, Callable[[Path], Child]] = {
    "postgres18": lambda folder: PostgresServer.start(find_postgres(18), folder, settings=_POSTGRES),
    "postgres14": lambda folder: PostgresServer.start(find_postgres(14), folder, settings=_POSTGRES),
    "kfake": lambda folder: start_kfake(),
    "kafka": start_apache_kafka,
    "pstest": lambda folder: start_pstest(),
    "valkey": start_valkey,
    "redis": start_redis,
}
_ATTACH: dict[str, Callable[[int, Path], Child]] = {
    "postgres18": lambda port, folder: PostgresServer(find_postgres(18), folder, port, OURSELVES),
    "postgres14": lambda port, folder: PostgresServer(find_postgres(14), folder, port, OURSELVES),
    "kfake": lambda port, folder: KafkaServer("kfake", [str(built_program("kfake"))], port, folder / "server.log"),
    "kafka": lambda port, folder: KafkaServer("Apache Kafka", [], port, folder / "server.log"),
    "pstest": lambda port, folder: PubSubServer([], port),
    "valkey": lambda port, folder: RedisServer("Valkey", [], port, folder / "server.log"),
    "redis": lambda port, folder: RedisServer("Redis", [], port, folder / "server.log"),
}


def _address(name: str) -> str:
    """Return an address in the abstract namespace: no file is left behind."""
    return f"\0{name}"


class Servers(ABC):
    """Servers by name."""

    @abstractmethod
    def get(self, name: str) -> Child:
        """Return the server, running. Raise ``PartMissing`` if it cannot be installed on this machine."""

    @abstractmethod
    def stop(self) -> None:
        """End the servers that this process owns."""

    def postgres(self, major: int) -> PostgresServer:
        return cast(PostgresServer, self.get(f"postgres{major}"))

    def kfake(self) -> KafkaServer:
        return cast(KafkaServer, self.get("kfake"))

    def kafka(self) -> KafkaServer:
        return cast(KafkaServer, self.get("kafka"))

    def pubsub(self) -> PubSubServer:
        return cast(PubSubServer, self.get("pstest"))

    def redis(self, name: str) -> RedisServer:
        """Return the server ``valkey`` or ``redis``."""
        return cast(RedisServer, self.get(name))


class SharedServers(Servers):
    """Owner of the servers. Each server starts at its first use and ends with this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, Child] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Child:
        with self._lock:
            if name not in self._running:
                folder = self._folder(name)
                folder.mkdir(parents=True)
                self._running[name] = _START[name](folder)
            return self._running[name]

    def port_of(self, name: str) -> int:
        return cast(PostgresServer | KafkaServer | PubSubServer | RedisServer, self.get(name)).port

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()

    def serve_workers(self) -> None:
        """Answer requests of workers on a thread until this process ends."""
        os.environ[SOCKET] = self._directory.name  # inherited by the workers
        listener = Listener(_address(self._directory.name))
        threading.Thread(target=self._answer, args=(listener,), name="shared-servers", daemon=True).start()

    def _answer(self, listener: Listener) -> None:
        while True:
            with listener.accept() as worker:
                name: str = worker.recv()
                try:
                    worker.send((self.port_of(name), self._folder(name), ""))
                except PartMissing as missing:
                    worker.send((0, self._folder(name), str(missing)))

    def _folder(self, name: str) -> Path:
        return self._directory / name


class SharedServersOfController(Servers):
    """Access of a worker to the servers of the controller."""

    def get(self, name: str) -> Child:
        with Client(_address(os.environ[SOCKET])) as controller:
            controller.send(name)
            port, folder, missing = controller.recv()
        if missing:
            raise PartMissing(missing)
        return _ATTACH[name](port, folder)

    def stop(self) -> None:
        pass  # the controller owns the servers
