"""The relay in a separate process, against a backlog, measured from its first message at the broker to its last."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
from measurement import Measured
from setup import Relay, Stage, Watermarks

_PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class Drained:
    """Result of a relay on the backlog."""

    delivery: Measured
    received: int
    """Messages at the broker at the end. A number above the number of events means duplicates."""


def drain(stage: Stage, url: str, topic: str, events: int) -> Drained:
    """Start a relay on the backlog, and wait for its last message."""
    marks = Watermarks(stage.broker.bootstrap, topic)
    with Relay(stage, url, topic) as relay:
        process = psutil.Process(relay.pid)
        began = marks.wait_for(1, _PATIENCE)
        cpu = sum(process.cpu_times()[:2])
        ended = marks.wait_for(events, _PATIENCE)
        cpu = sum(process.cpu_times()[:2]) - cpu
        memory = relay.peak_memory()
    received = marks.total()
    marks.close()
    return Drained(Measured(events, ended.seen - began.before, cpu, memory), received)
