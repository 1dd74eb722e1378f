"""Production relays inside the test's process, on a real database, with sinks that a test controls by name.

For tests of load and outages without kills. A test can read the status of the relay. Staged sinks are found by entry
point, as sinks of third parties.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg import sql

from mailboat.model import Message
from mailboat.runtime.config_source import Configuration
from mailboat.runtime.relay import Relay
from mailboat.runtime.relay_status import SubscriptionStatus
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.timings import Timings
from mailboat.sinks.protocol import SinkContext
from mailboat.store.settings import ReadLimits, RelayIdentity
from mailboat.store.table import TableLayout
from mailboat.testing.memory_sink import MemorySink
from mailboat_spec import read_documents
from support.ledger import Arrival, Written, payload, sequence_of
from support.manifests import Manifest
from support.relay_processes import SWIFT
from support.wait import await_until

# ---- relays -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(
    *manifests: Manifest,
    relay: str = "relay-1",
    timings: Timings | None = SWIFT,
    limits: ReadLimits | None = None,
    secrets: Secrets | None = None,
    follows: bool = False,
) -> AsyncIterator[Relay]:
    """Run a relay during the block, and stop it gracefully."""
    read = read_documents([(f"manifest {number}", manifest) for number, manifest in enumerate(manifests)])
    running = Relay(
        Configuration(read.relays[0], read.subscriptions),
        secrets=secrets or Secrets(None, {}),
        identity=RelayIdentity(relay, str(uuid.uuid4())),
        timings=timings,
        limits=limits,
        follows=follows,
    )
    stop = asyncio.Event()
    life = asyncio.create_task(running.run(stop))
    try:
        yield running
    finally:
        stop.set()
        await life


def status_of(relay: Relay, name: str) -> SubscriptionStatus:
    """Return the status of one subscription."""
    return next(s for s in relay.status().subscriptions if s.name.endswith(f"/{name}"))


# ---- staged sinks -------------------------------------------------------------------------------------------------


class StagedSink(MemorySink):
    """Memory sink that is registered by the name of its subscription and shared by all relays of a test."""

    stage: ClassVar[dict[str, StagedSink]] = {}
    given: SinkContext
    """Context of the last ``build``."""

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> StagedSink:
        name = context.subscription.split("/", 1)[-1]
        if name not in cls.stage:
            cls.stage[name] = super().build(config, context)
        cls.stage[name].given = context
        return cls.stage[name]

    async def close(self) -> None:
        """Keep the sink open, since other relays share it."""

    @property
    def numbers(self) -> dict[str | None, list[int]]:
        """Numbers of the arrived events in order, by key."""
        seen: dict[str | None, list[int]] = {}
        for message in self.arrived:
            seen.setdefault(message.key, []).append(json.loads(message.value or b"{}")["number"])
        return seen

    @property
    def ids(self) -> set[str]:
        """Ids of the arrived events."""
        return {message.event_id for message in self.arrived}

    @property
    def arrivals(self) -> list[Arrival]:
        """Arrivals for ``check_delivery``."""
        return [_arrival(message) for message in self.arrived]


OURS = TableLayout()
STAGED: Manifest = {"custom": {"type": "staged"}}
"""``spec.sink`` of a subscription with its sink in ``StagedSink.stage``."""


@contextmanager
def staged_sinks_installed(directory: Path) -> Iterator[dict[str, StagedSink]]:
    """Register ``custom: {type: staged}`` as an installed package does, and return the sinks by name."""
    information = directory / "staged_sinks-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: staged-sinks\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[mailboat.sinks]\nstaged = support.inprocess_relay:StagedSink\n")
    sys.path.append(str(directory))
    StagedSink.stage = {}
    try:
        yield StagedSink.stage
    finally:
        sys.path.remove(str(directory))


def _arrival(message: Message) -> Arrival:
    return Arrival(message.event_id, message.key, message.value, *sequence_of(message.headers), at=0.0)


# ---- events -------------------------------------------------------------------------------------------------------


def events(count: int, keys: int, *, first: int = 1, prefix: str = "key") -> list[Written]:
    """Return events with keys in turn. The events of a key are numbered from ``first``."""
    made = []
    for index in range(count):
        key, number = f"{prefix} {index % keys}", first + index // keys
        made.append(Written(str(uuid.uuid4()), key, number, payload(key, number)))
    return made


def write(
    url: str, written: Sequence[Written], event_type: str = "order.placed", *, layout: TableLayout = OURS
) -> dict[str, Written]:
    """Commit events in one transaction, in order, and return them by id."""
    names = (layout.columns.get(name, name) for name in ("event_id", "event_type", "key", "payload"))
    statement = sql.SQL("copy {} ({}) from stdin (format binary)").format(
        layout.outbox, sql.SQL(", ").join(map(sql.Identifier, names))
    )
    with psycopg.connect(url) as connection, connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(["uuid", "text", "text", "bytea"])
        for event in written:
            copy.write_row((uuid.UUID(event.event_id), event_type, event.key, event.payload))
    return {event.event_id: event for event in written}


class Load:
    """Writer on a thread that writes during a block, in rounds of one numbered event per key."""

    def __init__(self, url: str, keys: int, committed: dict[str, Written]) -> None:
        self.rounds = 0
        self._url = url
        self._keys = keys
        self._committed = committed

    @contextmanager
    def flowing(self, pause: float = 0.01) -> Iterator[None]:
        ending = threading.Event()

        def keep_writing() -> None:
            while not ending.wait(pause):
                self.write_some()

        thread = threading.Thread(target=keep_writing, name="load")
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    async def goes_on(self, rounds: int = 10) -> None:
        """Wait for a number of further rounds."""
        goal = self.rounds + rounds
        await await_until(lambda: self.rounds >= goal, timeout=30, what="some load")

    def write_some(self) -> None:
        self._committed.update(write(self._url, events(self._keys, self._keys, first=self.rounds + 1)))
        self.rounds += 1
