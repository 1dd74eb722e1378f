"""Apache Kafka without an installation: jars from Maven, one KRaft node, a minimal JVM."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from mailboat_devservers.cache import made_once
from mailboat_devservers.errors import PartMissing, ServerFailed
from mailboat_devservers.maven import copy_with_dependencies

_POM = Path(__file__).with_name("kafka-broker.xml")
_JAVA_NEEDED = 17
_JVM = ["-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
_QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
num.partitions=4
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.consumer.min.session.timeout.ms=6000
group.consumer.session.timeout.ms=6000
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=500
broker.session.timeout.ms={session_ms}
broker.heartbeat.interval.ms=500
log.cleaner.dedupe.buffer.size=2097152
"""


_SECURED = """\
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port},SASL_SSL://127.0.0.1:{secure.port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SASL_SSL://127.0.0.1:{secure.port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512
listener.name.sasl_ssl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\
  user_{secure.user}="{secure.password}";
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
ssl.keystore.location={secure.keystore}
"""


@dataclass(frozen=True, slots=True)
class SecureListener:
    """A second listener with TLS and authentication by PLAIN or SCRAM-SHA-512."""

    port: int
    keystore: Path
    """PEM: the private key (PKCS #8, not encrypted), then its certificate."""
    user: str
    password: str = field(repr=False)

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"


def prepare_broker(
    directory: Path, port: int, controller_port: int, secure: SecureListener | None = None, session: float = 9.0
) -> None:
    """Write the broker's configuration and format its storage.

    ``session``: broker session timeout in seconds. A killed broker can register again only after this time.
    """
    properties = _properties(directory)
    data, session_ms = directory / "data", int(session * 1000)
    text = _PROPERTIES.format(port=port, controller_port=controller_port, data=data, session_ms=session_ms)
    scram: list[str] = []
    if secure is not None:
        text += _SECURED.format(port=port, controller_port=controller_port, secure=secure)  # later lines override
        scram = ["--add-scram", f"SCRAM-SHA-512=[name={secure.user},password={secure.password}]"]
    properties.write_text(text)
    # Any 16 bytes in URL-safe base64 are a valid cluster id; a fixed one saves a JVM start.
    cluster_id = "bWFpbGJvYXQtaGFyYm9yMQ"
    format_storage = [*java_command(), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
    format_storage += scram
    done = subprocess.run(format_storage, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise ServerFailed(f"Kafka's storage could not be formatted:\n{done.stdout}")


def broker_command(directory: Path) -> list[str]:
    return [*java_command(), "kafka.Kafka", str(_properties(directory))]


def _properties(directory: Path) -> Path:
    return directory / "server.properties"


def java_command() -> list[str]:
    """Return the command of a JVM with Kafka's jars on its class path. The jars are fetched on first use."""
    return [_find_java(), *_JVM, _QUIET, "-cp", f"{kafka_jars()}/*"]


def kafka_jars() -> Path:
    """Return the folder with the broker and its dependencies, which are fetched on first use."""
    digest = hashlib.sha256(_POM.read_bytes()).hexdigest()[:16]
    return made_once(f"kafka-{digest}", lambda into: copy_with_dependencies(_POM, into))


def _find_java() -> str:
    installed = shutil.which("java")
    if installed is None:
        raise PartMissing(f"Apache Kafka needs Java {_JAVA_NEEDED} or newer: put java on the PATH")
    answer = subprocess.run([installed, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', answer)
    if found is None or int(found[1]) < _JAVA_NEEDED:
        first = answer.splitlines()[0] if answer else "no version"
        raise PartMissing(f"Apache Kafka needs Java {_JAVA_NEEDED} or newer, and the one on the PATH says: {first}")
    return installed
