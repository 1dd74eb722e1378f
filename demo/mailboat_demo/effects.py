"""A consumer without a broker that is repeatedly killed in its handler, and the count of its effects.

    python -m mailboat_demo.effects URL FILE

Its handler writes one row per event into ``shop.effects``, in the transaction of the pull. If the file exists at the
start, the process kills itself at random between that row and the commit, which simulates a crash.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import psycopg

from mailboat import Consumer, Event
from mailboat_devservers.processes import Child

_TABLE: Final = "create table if not exists shop.effects (event_id uuid not null, consumer integer not null)"
_DIES: Final = 0.02
"""Probability that a handler kills its process. After ``_DEATHS`` crashes the consumer runs undisturbed."""
_DEATHS: Final = 5


def consumer(url: str, *, deadly: bool) -> Consumer:
    view = Consumer(
        "demo/effects", url=url, spec={"filter": {"eventTypes": ["order.*"]}, "delivery": {"maxAttempts": 100}}
    )
    random = Random()

    @view.on("order.*")
    async def note(event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("insert into shop.effects values (%s, %s)", [event.id, os.getpid()])
        if deadly and random.random() < _DIES:
            os.kill(os.getpid(), signal.SIGKILL)

    return view


class EffectsProcess(Child):
    """The consumer process, restarted by a thread after each crash."""

    def __init__(self, url: str, folder: Path) -> None:
        self.deaths = 0
        self._url = url
        self._deadly = folder / "deadly"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="demo-effects", daemon=True)
        command = [sys.executable, "-m", "mailboat_demo.effects", url, str(self._deadly)]
        super().__init__("effects", command, log=folder / "effects.log", ready=lambda: True)

    def begin(self) -> None:
        with psycopg.connect(self._url) as connection:
            connection.execute(_TABLE)
        self._deadly.touch()
        self.launch()
        self._thread.start()

    def _keep_alive(self) -> None:
        while not self._closed.wait(0.1):
            if not self.running:
                self.deaths += 1
                if self.deaths >= _DEATHS:
                    self._deadly.unlink(missing_ok=True)
                self.launch()

    def counted(self) -> tuple[int, int]:
        """Return the number of effects, and the number of distinct events among them."""
        with psycopg.connect(self._url) as connection:
            row = connection.execute("select count(*), count(distinct event_id) from shop.effects").fetchone()
        return row if row is not None else (0, 0)

    def close(self) -> None:
        """Stop the process. Safe to call twice, and before ``begin``."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        with suppress(Exception):
            self.kill()


if __name__ == "__main__":
    consumer(sys.argv[1], deadly=Path(sys.argv[2]).exists()).run()
