"""Measurements, each in a new process: elapsed time, CPU time and peak memory.

CPU time per event hardly depends on other load of the machine. Events per second do.
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
    """Cost of moving a number of events."""

    events: int
    seconds: float
    cpu_seconds: float
    memory: int | None = None
    """Peak resident memory in bytes."""

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    @property
    def cpu_per_event(self) -> float:
        """Microseconds of CPU time, over all threads of the process."""
        return self.cpu_seconds / self.events * 1e6


class Stopwatch:
    """Measurement of this process, from the creation of the object on."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, events: int) -> Measured:
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        return Measured(events, seconds, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def in_own_process(work: Callable[..., Answer], *arguments: object) -> Answer:
    """Run a function of a module in a new process, set up like that of a relay, and return the result."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=configure_gc) as pool:
        return pool.submit(work, *arguments).result()
