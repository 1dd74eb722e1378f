"""Brokers that speak Kafka's protocol, each a process that a test may kill, suspend and restart.

``kfake`` starts at once and needs 10 MB; Apache Kafka is the real thing and needs Java and Maven. Both look the same
from here on, and neither creates topics by itself: a misspelt topic must fail in a test as it would in production.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from mailboat_harbor.golang import built_program
from mailboat_harbor.kafka_apache import broker_command, prepare_broker
from mailboat_harbor.ports import accepts_connections, free_port
from mailboat_harbor.processes import Child

__all__ = ["KafkaServer", "start_apache_kafka", "start_kfake"]


class KafkaServer(Child):
    """One broker; ``bootstrap`` is what a client's ``bootstrap.servers`` wants."""

    def __init__(self, name: str, command: list[str], port: int, log: Path | None) -> None:
        super().__init__(name, command, log=log, ready=self._answers)
        self.port = port
        self.bootstrap = f"127.0.0.1:{port}"

    def create_topic(self, name: str, partitions: int = 4, config: Mapping[str, str] | None = None) -> None:
        """Returns once the topic can be produced to."""
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {}))
        admin = self._admin()  # held: a request dies with its client
        admin.create_topics([topic], operation_timeout=10)[name].result(timeout=15)

    def _admin(self) -> AdminClient:
        # A client of its own each time: one that saw the broker die would back off before it tries again.
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "socket.timeout.ms": 5000})

    def _answers(self) -> bool:
        if not accepts_connections(self.port):
            return False
        try:
            admin = self._admin()
            return bool(admin.list_topics(timeout=2).brokers)
        except KafkaException:
            return False


def start_kfake(directory: Path | None = None, port: int | None = None) -> KafkaServer:
    """A kfake broker. With a directory what was acknowledged survives ``kill``, else everything is in memory."""
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


def start_apache_kafka(directory: Path, port: int | None = None) -> KafkaServer:
    """An Apache Kafka broker (KRaft, one node) on a folder of its own."""
    port = port or free_port()
    directory.mkdir(parents=True, exist_ok=True)
    prepare_broker(directory, port, controller_port=free_port())
    server = KafkaServer(f"Apache Kafka on port {port}", broker_command(directory), port, directory / "server.log")
    server.launch()
    return server
