"""Poll interval of the outbox. Polling finds every event; a wake-up (NOTIFY) only shortens the wait.

    busy      the last poll found events: poll again at once (the duration of the last tick sets the pace)
    lingering no events for a moment: poll every few milliseconds, writers do not notify
    idle      no events for longer (``asleep``): writers notify, and the interval grows from ``poll`` to ``longest``

The interval does not grow while a transaction is open that began before notifications were requested. Its writer may
have checked for the request before, so only a poll finds its events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LINGER = 0.05
"""Seconds without an event before the relay becomes idle."""
LINGER_POLL = 0.004
"""Poll interval before that, in seconds: bounds latency under a low steady load, at the price of cheap empty reads."""
SHORT = 0.003
SHARE = 0.5
"""Pause after a tick, as a share of its duration beyond ``SHORT`` seconds: many cursors make ticks less frequent
instead of the database busier."""
LONGEST_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class WakeSettings:
    """``spec.wake`` in seconds."""

    poll: float = 0.5
    idle_after: int = 3
    longest: float = 60.0


@dataclass(frozen=True, slots=True)
class Rhythm:
    """State of the poll interval."""

    settings: WakeSettings
    quiet_since: float | None = None
    asleep: bool = False
    empty_polls: int = 0

    def found(self) -> Rhythm:
        """Return the state after a poll that found events."""
        return Rhythm(self.settings)

    def quiet(self, now: float) -> Rhythm:
        """Return the state after a poll that found no events."""
        return replace(self, quiet_since=now if self.quiet_since is None else self.quiet_since)

    def should_sleep(self, now: float) -> bool:
        """Return whether to become idle and request notifications."""
        return not self.asleep and self.quiet_since is not None and now - self.quiet_since >= LINGER

    def slept(self) -> Rhythm:
        """Return the state after notifications were requested."""
        return replace(self, asleep=True, empty_polls=0)

    def polled_in_vain(self, undecided_writers: bool) -> Rhythm:
        """Return the state after an empty poll while idle."""
        return self if undecided_writers else replace(self, empty_polls=self.empty_polls + 1)

    def wait(self, last_tick: float) -> float:
        """Return the seconds until the next poll, if there is no wake-up and no settlement."""
        if self.quiet_since is None:
            return pause(last_tick)
        if not self.asleep:
            return max(LINGER_POLL, pause(last_tick))
        doublings = max(0, self.empty_polls - self.settings.idle_after)
        return float(min(self.settings.poll * 2 ** min(doublings, 32), self.settings.longest))


def pause(last_tick: float) -> float:
    """Return the minimum time between two ticks."""
    return min(max(last_tick - SHORT, 0.0) * SHARE, LONGEST_PAUSE)
