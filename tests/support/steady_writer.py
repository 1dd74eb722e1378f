"""Application that writes while relays or maintenance work, and that none of them may delay or fail (G10)."""

from __future__ import annotations

import psycopg

from mailboat import emit
from mailboat_devservers.postgres import Database
from support.background import BackgroundThread
from support.wait import wait_until


class SteadyWriter(BackgroundThread):
    """Writer with a short lock timeout, which emits during its ``with`` block. A failed statement fails the test."""

    def __init__(self, database: Database, *, lock_timeout: str = "200ms") -> None:
        super().__init__("writer")
        self.written = 0
        self._url = database.url
        self._lock_timeout = lock_timeout

    def work(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(f"set lock_timeout = '{self._lock_timeout}'".encode())
            connection.execute("set statement_timeout = '60s'")
            while not self._ending.wait(0.002):
                connection.execute("select mailboat.emit('written', '{}'::jsonb, key => 'k')")
                with connection.transaction():
                    # psycopg prepares this statement, and its plan outlives detaches
                    emit(connection, "written", {}, key="k")
                self.written += 2

    def writes_on(self, events: int = 5) -> None:
        """Wait until the writer has written more events."""
        goal = self.written + events
        wait_until(lambda: self.written >= goal or self._failure, 60, "the writer to go on")
        self.raise_failure()
