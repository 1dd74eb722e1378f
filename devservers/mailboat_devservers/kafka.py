"""Kafka brokers as processes that a test may kill, suspend and restart.

``kfake`` starts immediately and needs 10 MB; Apache Kafka is the real broker and needs Java and Maven. Both have the
same interface. Neither creates topics automatically: a misspelt topic must fail in a test as in production.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from mailboat_devservers.errors import ServerFailed
from mailboat_devservers.golang import built_program
from mailboat_devservers.kafka_apache import SecureListener, broker_command, prepare_broker
from mailboat_devservers.ports import accepts_connections, free_port
from mailboat_devservers.processes import Child

__all__ = ["KafkaServer", "SecureListener", "start_apache_kafka", "start_kfake"]

_PATIENCE = 60.0
"""Timeout in seconds for broker requests that are usually immediate, generous for a busy machine."""
_POLL = 0.05


class KafkaServer(Child):
    """One broker; ``bootstrap`` is the value for a client's ``bootstrap.servers``."""

    def __init__(self, name: str, command: list[str], port: int, log: Path | None) -> None:
        super().__init__(name, command, log=log, ready=self._answers, start_timeout=180.0)
        self.port = port
        self.bootstrap = f"127.0.0.1:{port}"

    def create_topic(self, name: str, partitions: int = 4, config: Mapping[str, str] | None = None) -> None:
        """Create a topic; return once all partitions have a leader."""
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {}))
        deadline = time.monotonic() + _PATIENCE
        admin = self._admin()  # keep a reference: pending requests end with their client
        while not _created(admin, topic, retry=time.monotonic() < deadline):
            time.sleep(_POLL)
        while not _is_led(admin, name, partitions):
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} has the topic {name}, and not all of it can be produced to.")
            time.sleep(_POLL)

    def _admin(self) -> AdminClient:
        # A new client each time: a client that saw the broker die would back off before it reconnects.
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "socket.timeout.ms": 5000})

    def _answers(self) -> bool:
        if not accepts_connections(self.port):
            return False
        try:
            admin = self._admin()
            return bool(admin.list_topics(timeout=2).brokers)
        except KafkaException:
            return False


def _created(admin: AdminClient, topic: NewTopic, *, retry: bool) -> bool:
    """Create the topic. Return False if no broker is registered as alive and ``retry`` allows another request."""
    answer = admin.create_topics([topic], operation_timeout=_PATIENCE, request_timeout=_PATIENCE)[topic.topic]
    try:
        answer.result(timeout=_PATIENCE + 10)
    except KafkaException as error:
        if retry and error.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR:
            return False
        raise
    return True


def _is_led(admin: AdminClient, topic: str, partitions: int) -> bool:
    try:
        found = admin.list_topics(topic, timeout=5).topics[topic].partitions.values()
    except KafkaException:
        return False
    return len(found) == partitions and all(each.leader >= 0 for each in found)


def start_kfake(directory: Path | None = None, port: int | None = None) -> KafkaServer:
    """Start a kfake broker. With a directory, acknowledged records survive ``kill``; without one, all is in memory."""
    port = port or free_port()
    command = [str(built_program("kfake")), "-port", str(port)]
    if directory is not None:
        data = directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        command += ["-dir", str(data)]
    log = None if directory is None else directory / "server.log"
    server = KafkaServer(f"kfake on port {port}", command, port, log)
    server.launch()
    return server


def start_apache_kafka(
    directory: Path, port: int | None = None, *, secure: SecureListener | None = None, to_be_killed: bool = False
) -> KafkaServer:
    """Start an Apache Kafka broker (KRaft, one node) with its own folder. ``secure`` opens a second port, with TLS.

    With ``to_be_killed``, the session timeout is short, so that a killed broker can register again soon. Otherwise the
    broker may freeze for seconds before it counts as dead.
    """
    port = port or free_port()
    directory.mkdir(parents=True, exist_ok=True)
    prepare_broker(directory, port, controller_port=free_port(), secure=secure, session=2.0 if to_be_killed else 9.0)
    server = KafkaServer(f"Apache Kafka on port {port}", broker_command(directory), port, directory / "server.log")
    server.launch()
    return server
