"""When to look at the outbox again: polling is the truth, a ring only shortens the wait.

    busy      something was found just now: look again at once (the last tick's duration sets the pace)
    lingering nothing was found for a moment: look every few milliseconds, writers are not asked to ring
    asleep    nothing for longer: the doorbell hangs out, and the poll interval grows from ``poll`` to ``longest``

The interval does not grow while a transaction that was open when the doorbell was hung out still is: its writer may
have looked before, and only a poll will find its events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LINGER = 0.05
"""Seconds without an event before the relay goes to sleep."""
LINGER_POLL = 0.004
"""Seconds between looks meanwhile: it bounds latency under a steady trickle, at the price of cheap empty reads."""
SHORT = 0.003
SHARE = 0.5
"""Pause after a tick, as a share of what it took beyond ``SHORT`` seconds: many cursors make ticks rarer, not the
database busier."""
LONGEST_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class WakeSettings:
    """``spec.wake`` in seconds."""

    poll: float = 0.5
    idle_after: int = 3
    longest: float = 60.0


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How quiet it has been."""

    settings: WakeSettings
    quiet_since: float | None = None
    asleep: bool = False
    empty_polls: int = 0

    def found(self) -> Rhythm:
        """There were events."""
        return Rhythm(self.settings)

    def quiet(self, now: float) -> Rhythm:
        """There were none."""
        return replace(self, quiet_since=now if self.quiet_since is None else self.quiet_since)

    def should_sleep(self, now: float) -> bool:
        """Whether it is time to hang out the doorbell."""
        return not self.asleep and self.quiet_since is not None and now - self.quiet_since >= LINGER

    def slept(self) -> Rhythm:
        """The doorbell hangs out."""
        return replace(self, asleep=True, empty_polls=0)

    def polled_in_vain(self, undecided_writers: bool) -> Rhythm:
        """A poll while asleep found nothing."""
        return self if undecided_writers else replace(self, empty_polls=self.empty_polls + 1)

    def wait(self, last_tick: float) -> float:
        """Seconds until the next look, if nobody rings and nothing is to be settled."""
        if self.quiet_since is None:
            return pause(last_tick)
        if not self.asleep:
            return max(LINGER_POLL, pause(last_tick))
        doublings = max(0, self.empty_polls - self.settings.idle_after)
        return float(min(self.settings.poll * 2 ** min(doublings, 32), self.settings.longest))


def pause(last_tick: float) -> float:
    """The least time between two ticks."""
    return min(max(last_tick - SHORT, 0.0) * SHARE, LONGEST_PAUSE)
