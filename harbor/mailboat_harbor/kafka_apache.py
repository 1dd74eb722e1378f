"""Apache Kafka without an installation: the jars from Maven, one KRaft node, the smallest JVM that does it."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from mailboat_harbor.cache import made_once
from mailboat_harbor.maven import copy_with_dependencies
from mailboat_harbor.missing import PartMissing, ServerFailed

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
# A killed broker is let back in only after its session ended; the default of 9 s would be spent waiting.
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
log.cleaner.dedupe.buffer.size=2097152
"""


def prepare_broker(directory: Path, port: int, controller_port: int) -> None:
    """Write the broker's configuration and format its storage."""
    properties = _properties(directory)
    data = directory / "data"
    properties.write_text(_PROPERTIES.format(port=port, controller_port=controller_port, data=data))
    # Any 16 bytes in URL-safe base64 are a cluster id; saves starting a JVM for a random one.
    cluster_id = "bWFpbGJvYXQtaGFyYm9yMQ"
    format_storage = [*java_command(), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
    done = subprocess.run(format_storage, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise ServerFailed(f"Kafka's storage could not be formatted:\n{done.stdout}")


def broker_command(directory: Path) -> list[str]:
    return [*java_command(), "kafka.Kafka", str(_properties(directory))]


def _properties(directory: Path) -> Path:
    return directory / "server.properties"


def java_command() -> list[str]:
    """A JVM with Kafka's jars on its class path; fetches them on first use."""
    digest = hashlib.sha256(_POM.read_bytes()).hexdigest()[:16]
    java = _findjava_command()
    jars = made_once(f"kafka-{digest}", lambda into: copy_with_dependencies(_POM, into))
    return [java, *_JVM, _QUIET, "-cp", f"{jars}/*"]


def _findjava_command() -> str:
    installed = shutil.which("java")
    if installed is None:
        raise PartMissing(f"Apache Kafka needs Java {_JAVA_NEEDED} or newer: put java on the PATH")
    answer = subprocess.run([installed, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', answer)
    if found is None or int(found[1]) < _JAVA_NEEDED:
        first = answer.splitlines()[0] if answer else "no version"
        raise PartMissing(f"Apache Kafka needs Java {_JAVA_NEEDED} or newer, and the one on the PATH says: {first}")
    return installed
