"""Concurrent writers with the random behaviour of applications.

Each writer locks the row of its key (or of two keys in sorted order, which avoids deadlocks) and takes the key's next
number under that lock. At random a writer takes its transaction id early, pauses with the lock held, writes through
savepoints of which some are rolled back, and rolls back the whole transaction.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Self

import psycopg

from mailboat import emit
from support.ledger import Ledger, Written, payload

ACCOUNTS = """
create table if not exists accounts (key text primary key, number bigint not null default 0);
insert into accounts (key) select 'account-' || n from generate_series(1, {keys}) as n on conflict do nothing;
"""


class _Undo(Exception):
    """Signal to roll back a transaction or a savepoint."""


class Racers:
    """Writers during a ``with`` block, each with a thread and a connection."""

    def __init__(self, url: str, writers: int = 8, keys: int = 40, *, seed: int = 1, dawdle: float = 0.02) -> None:
        self.ledger = Ledger()
        self.seed = seed
        self._url = url
        self._dawdle = dawdle
        self._keys = [f"account-{number}" for number in range(1, keys + 1)]
        self._ending = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(n,), name=f"racer-{n}") for n in range(writers)]
        with psycopg.connect(url) as connection:
            connection.execute(ACCOUNTS.format(keys=keys))

    def _run(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                while not self._ending.is_set():
                    self._one_transaction(connection, chance)
        except BaseException as error:
            self._failures.append(error)

    def _one_transaction(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        written: list[Written] = []
        undone: list[Written] = []
        try:
            with connection.transaction():
                if chance.random() < 0.4:
                    connection.execute("select pg_current_xact_id()")  # as an earlier write does
                    self._pause(chance)
                keys = sorted(chance.sample(self._keys, 2 if chance.random() < 0.2 else 1))
                for key in keys:
                    connection.execute("select from accounts where key = %s for update", [key])
                self._pause(chance)
                for _ in range(chance.randint(1, 5)):
                    key = chance.choice(keys)
                    if chance.random() < 0.3:
                        self._in_a_savepoint(connection, chance, key, written, undone)
                    else:
                        written.append(_write(connection, key))
                self._pause(chance)
                if chance.random() < 0.15:
                    raise _Undo
        except _Undo:
            self.ledger.roll_back(written + undone)
        else:
            self.ledger.commit(written)
            self.ledger.roll_back(undone)

    def _in_a_savepoint(
        self,
        connection: psycopg.Connection[Any],
        chance: random.Random,
        key: str,
        written: list[Written],
        undone: list[Written],
    ) -> None:
        event: Written | None = None
        try:
            with connection.transaction():
                event = _write(connection, key)
                if chance.random() < 0.4:
                    raise _Undo
        except _Undo:
            assert event is not None
            undone.append(event)
        else:
            written.append(event)

    def _pause(self, chance: random.Random) -> None:
        """Vary the duration of transactions. Most are short."""
        if chance.random() < 0.5:
            time.sleep(chance.random() ** 3 * self._dawdle)

    def wait(self, seconds: float) -> None:
        """Let the writers run for a time. If a writer fails, raise its error at once."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._failures:
            self._ending.wait(min(left, 0.1))
        self._raise()

    def finish(self) -> Ledger:
        """Stop the writers and return the ledger."""
        self._ending.set()
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), f"{thread.name} did not end within 30 s: a transaction waits for a lock"
        self._raise()
        return self.ledger

    def _raise(self) -> None:
        if self._failures:
            raise AssertionError(f"a writer failed: {self._failures[0]!r}") from self._failures[0]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(timeout=30)


def _write(connection: psycopg.Connection[Any], key: str) -> Written:
    row = connection.execute(
        "update accounts set number = number + 1 where key = %s returning number", [key]
    ).fetchone()
    assert row is not None
    content = payload(key, row[0])
    return Written(str(emit(connection, "account.changed", content, key=key)), key, row[0], content)
