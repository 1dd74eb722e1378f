"""Work on a thread beside a test."""

from __future__ import annotations

import threading
from typing import Self


class BackgroundThread:
    """Thread that works during its ``with`` block. The end of the block, or ``raise_failure``, raises its error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    def work(self) -> None:
        """Work until ``self._ending`` is set."""
        raise NotImplementedError

    def raise_failure(self) -> None:
        """Raise if the thread failed."""
        if self._failure is not None:
            raise AssertionError(f"{self.name} failed") from self._failure

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._ending.set()
        self._thread.join(timeout=70)
        if error is None:
            self.raise_failure()
            assert not self._thread.is_alive(), f"{self.name} did not end within 70 s"
