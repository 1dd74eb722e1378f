"""How a measurement is taken: each in a fresh process, with its time, its processor time and its peak memory.

Processor time per event is there because it hardly depends on what else the machine does; events per second do.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from mailboat.runtime.gc_settings import configure_gc

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Measured:
    """What moving some events took."""

    events: int
    seconds: float
    cpu_seconds: float
    memory: int | None = None
    """Bytes of resident memory at their highest."""

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    @property
    def cpu_per_event(self) -> float:
        """Microseconds, over all threads of the process."""
        return self.cpu_seconds / self.events * 1e6


class Stopwatch:
    """Measures this very process from its start on."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, events: int) -> Measured:
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        return Measured(events, seconds, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def in_own_process(work: Callable[..., Answer], *arguments: object) -> Answer:
    """The answer of a module's function, from a process that has done nothing else, set up as a relay's is."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=configure_gc) as pool:
        return pool.submit(work, *arguments).result()
