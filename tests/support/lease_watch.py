"""Samples of the cursors during a test, as evidence of owners and windows."""

from __future__ import annotations

from typing import Any

import psycopg

from support.background import BackgroundThread


class Watch(BackgroundThread):
    """Sampler of all cursors during its ``with`` block."""

    def __init__(self, url: str) -> None:
        super().__init__("the watch")
        self.owners: frozenset[str] = frozenset()
        """Relays that owned a partition in the last sample."""
        self.reigns: set[str] = set()
        """Epochs of all leases."""
        self.small: set[tuple[Any, ...]] = set()
        """Open windows that are read at once."""
        self.large: set[tuple[Any, ...]] = set()
        """Open windows that are read in chunks."""
        self._url = url

    def work(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._ending.wait(0.02):
                self._sample(connection)

    def _sample(self, connection: psycopg.Connection[Any]) -> None:
        rows = connection.execute(
            "select subscription_id, partition, window_snapshot::text, highest, owner, epoch::text"
            " from mailboat.cursors"
        ).fetchall()
        self.owners = frozenset(owner for *_, owner, _ in rows if owner)
        self.reigns |= {epoch for *_, epoch in rows if epoch}
        for subscription, partition, window_snapshot, highest, *_ in rows:
            if window_snapshot is not None:
                (self.small if highest is None else self.large).add((subscription, partition, window_snapshot))
