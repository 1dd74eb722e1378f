"""Looks at the relays' bookkeeping while something else goes on, so that a test can say what really happened."""

from __future__ import annotations

from typing import Any

import psycopg

from support.background import Bystander


class Watch(Bystander):
    """Samples all cursors for as long as its block lasts."""

    def __init__(self, url: str) -> None:
        super().__init__("the watch")
        self.owners: frozenset[str] = frozenset()
        """Relays that own a partition, at the last look."""
        self.reigns: set[str] = set()
        """One for every time that a relay took a partition over."""
        self.small: set[tuple[Any, ...]] = set()
        """Windows that were seen open, and were read at once."""
        self.large: set[tuple[Any, ...]] = set()
        """Those that were walked in stretches."""
        self._url = url

    def work(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._ending.wait(0.02):
                self._look(connection)

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        rows = connection.execute(
            "select subscription_id, partition, window_snapshot::text, highest, owner, epoch::text"
            " from mailboat.cursors"
        ).fetchall()
        self.owners = frozenset(owner for *_, owner, _ in rows if owner)
        self.reigns |= {epoch for *_, epoch in rows if epoch}
        for subscription, partition, window_snapshot, highest, *_ in rows:
            if window_snapshot is not None:
                (self.small if highest is None else self.large).add((subscription, partition, window_snapshot))
