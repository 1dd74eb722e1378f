"""Consumers of one Kafka topic as processes, their effects, and the check of all effects."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from support.broker_consumer_main import FAILS, consume
from support.consumer_processes import FORKS, STARTED, ended
from support.kafka_feed import Feed, committed
from support.wait import wait_until

PARTITIONS = 6
HANDLERS = 8
"""Handlers that a process runs at the same time."""
Effect = tuple[str, int]
"""Key and number of an event."""


class Consumers:
    """Processes of one consumer group. Every process is killed at the end of the block."""

    def __init__(self, server: KafkaServer, folder: Path, *, outbox: Database | None = None, **orders: Any) -> None:
        """Prepare the files and the feed.

        ``orders``: topic, group, redis; others are in ``support.broker_consumer_main``. With an ``outbox``, the effects
        are rows in its database, and the store is the inbox there.
        """
        self.server = server
        self._folder = folder
        self._outbox = outbox
        files = {name: str(folder / name) for name in ("effects", "dead", "log")}
        self.orders = {"bootstrap": server.bootstrap, "protocol": "classic", "store": "redis", **files, **orders}
        if outbox is not None:
            columns = "at bigserial, key text, number int, attempt int"
            outbox.execute(f"create table effects ({columns})")
            self.orders |= {"store": "inbox", "postgres": outbox.url}
        self.feed = Feed(server, self.orders["topic"])
        self.running: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.join()

    def start(self, **orders: Any) -> Any:
        """Start a process and return it."""
        process = FORKS.Process(target=consume, args=({**self.orders, **orders},))
        process.start()
        self.running.append(process)
        return process

    def stop(self, *processes: Any) -> None:
        """Stop processes with SIGTERM, and require exit status 0."""
        for each in processes:
            wait_until(lambda: f" {each.pid} root {STARTED}" in self.log(), what="its start")  # noqa: B023
            each.terminate()
        assert [ended(each) for each in processes] == [0] * len(processes), self.log()[-5000:]

    def log(self) -> str:
        path = self._folder / "log"
        return path.read_text() if path.exists() else ""

    def has_partitions(self, process: Any) -> bool:
        return re.search(rf" {process.pid} \S+ Partitions assigned", self.log()) is not None

    def effects(self) -> list[tuple[Effect, int]]:
        """Return all effects in their order, with the attempt in which each happened."""
        if self._outbox is not None:
            rows = self._outbox.execute("select key, number, attempt from effects order by at")
            return [((key, number), attempt) for key, number, attempt in rows]
        return [((line["key"], line["number"]), line["attempt"]) for line in self._lines("effects")]

    def effect_count(self) -> int:
        if self._outbox is not None:
            ((count,),) = self._outbox.execute("select count(*) from effects")
            return int(count)
        path = self._folder / "effects"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def send_and_wait(self, keys: Iterable[str], effects: int) -> None:
        """Send events and wait for a number of further effects.

        A group with killed members continues after their session time-out, and a busy machine may be slow. The deadline
        is for a group that makes no progress.
        """
        goal = self.effect_count() + effects
        self.feed.send(keys)
        wait_until(lambda: self.effect_count() >= goal, timeout=180, what="consumers to handle events")

    def letters(self) -> list[tuple[Effect, int, str]]:
        """Return all dead letters with their attempts and reasons."""
        return [((line["key"], line["number"]), line["attempt"], line["reason"]) for line in self._lines("dead")]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def settle(self, timeout: float = 120, what: str = "everything to be handled") -> None:
        """Wait until the group has committed all events."""
        wait_until(
            lambda: sum(committed(self.server, self.feed.topic, self.orders["group"], PARTITIONS).values()),
            timeout,
            what=what,
            met=lambda done: done == len(self.feed.sent),
        )

    def lost(self) -> set[Effect]:
        """Return events with neither an effect nor a dead letter."""
        found = {effect for effect, _ in self.effects()} | {effect for effect, *_ in self.letters()}
        return set(self.feed.sent) - found

    def twice(self) -> int:
        """Return the number of repeated effects."""
        return sum(count - 1 for count in Counter(effect for effect, _ in self.effects()).values())

    def check(self, *, most_twice: int) -> None:
        """Check that no event is lost, that the events of a key happen in order, and that few happen twice."""
        lost = self.lost()
        assert not lost, f"{len(lost)} events are lost"
        numbers: dict[str, list[int]] = defaultdict(list)
        for (key, number), _ in self.effects():
            numbers[key].append(number)
        for key, found in numbers.items():  # a repeated effect is the last one of its key, never an earlier one
            assert found == sorted(found), f"key {key} is out of order: {found}"
        assert self.twice() <= most_twice, f"{self.twice()} effects happened again"

    def check_attempts(self) -> None:
        """Check that every effect happened once, in the attempt that its handler chose. Outages cost no attempt."""
        self.check(most_twice=0)
        fails = self.orders.get("fails", True)
        wrong = [
            (effect, attempt)
            for effect, attempt in self.effects()
            if attempt != (2 if fails and effect[1] % 30 == FAILS else 1)
        ]
        assert not wrong, f"attempts were counted while something was unavailable: {wrong[:10]}"
