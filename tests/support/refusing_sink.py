"""Third-party sink, found by its entry point, that appends to a file and refuses events by their headers.

An event with the header ``refused-until: 3`` is refused in its first two attempts, with ``always`` in all attempts. The
header ``kills`` kills the relay. After a SIGKILL during a write the file may end in a torn line, which counts as not
written.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mailboat.errors import DeliveryError, EventRefused
from mailboat.model import Message
from mailboat.sinks.protocol import Failures, SinkContext, Traits
from support.ledger import Arrival, sequence_of


class PickySink:
    """Sink that does not stop a key after a failure, so the relay publishes one message of a key at a time."""

    traits = Traits(header_prefix="ce_", stops_behind_failure=False)

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def build(cls, config: Mapping[str, Any], context: SinkContext) -> Self:
        return cls(Path(config["path"]))

    async def open(self) -> None:
        self._append(b"\n")  # ends a torn line of a killed process

    async def close(self) -> None:
        """Do nothing."""

    def refusal(self, message: Message) -> EventRefused | None:
        return None

    async def publish(self, batch: Sequence[Message]) -> Failures:
        failures: dict[int, DeliveryError] = {}
        for index, message in enumerate(batch):
            if "kills" in message.headers:
                os.kill(os.getpid(), signal.SIGKILL)
            elif _is_refused(message):
                failures[index] = EventRefused("asks to be refused")
            else:
                self._append(_line(message))
        return failures

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _is_refused(message: Message) -> bool:
    headers = message.headers
    until = headers.get("refused-until")
    if until is None or message.topic is not None:
        return False
    return until == "always" or int(headers.get("mailboat-attempt", 1)) < int(until)


def _line(message: Message) -> bytes:
    value = None if message.value is None else message.value.decode()
    record = {"topic": message.topic, "key": message.key, "value": value, "headers": message.headers}
    return json.dumps(record).encode() + b"\n"


def arrivals(path: Path, topic: str | None = None) -> Iterator[Arrival]:
    """Yield the arrivals of a topic in the file, in order."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # empty, or torn
        if record["topic"] != topic:
            continue
        headers, value = record["headers"], record["value"]
        payload = None if value is None else value.encode()
        yield Arrival(headers["ce_id"], record["key"], payload, *sequence_of(headers), 0.0)


def install(directory: Path) -> None:
    """Write the metadata of an installed package, with the entry point ``picky``, into a folder for PYTHONPATH."""
    info = directory / "picky-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mailboat.sinks]\npicky = {__name__}:{PickySink.__name__}\n")
