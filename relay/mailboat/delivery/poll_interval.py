"""Poll interval of the outbox. Polling finds every event; a wake-up (NOTIFY) only shortens the wait.

    busy      the last poll found events, and writers do not notify: poll again at once (the duration of the last tick
              sets the pace)
    lingering no events for a moment, and writers do not notify: poll every few milliseconds
    idle      no events for longer (``idle``): writers notify, and the interval grows from ``poll`` to ``longest``

Once a notification has arrived, writers notify until polls find many events a second (``crowded``). Below that rate
the relay is idle after each poll, and an event costs one notification and one tick. A poll by the clock that finds
events without a notification ends this: writers may not notify here (a table without the trigger), or one was lost.

The interval does not grow while a transaction is open that began before notifications were requested. Its writer may
have checked for the request before, so only a poll finds its events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LINGER = 0.05
"""Seconds without an event before the relay becomes idle."""
LINGER_POLL = 0.004
"""Poll interval before that, in seconds: bounds latency under a low steady load, at the price of cheap empty reads."""
CROWD = 75
CROWD_WITHIN = 0.5
"""So many events within so many seconds, or no poll without events for as long: then writers stop notifying."""
MOST_PER_POLL = 10
"""Events of one poll that count at most: a large transaction is one notification."""
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
class PollInterval:
    settings: WakeSettings
    quiet_since: float | None = None
    idle: bool = False
    empty_polls: int = 0
    notified: bool = False
    """Notifications are requested, and the last events came with one."""
    events: int = 0
    """Events found since ``events_since``, while writers notify."""
    events_since: float = 0.0
    busy_since: float | None = None
    """Time of the first find after the last poll without events."""

    def due(self) -> PollInterval:
        """Return the state in which the next poll is due at once."""
        return replace(self, quiet_since=None, idle=False)

    def woken(self) -> PollInterval:
        """Return the state after a notification that was requested: the next poll is due at once."""
        return replace(self.due(), notified=True)

    def found(self, now: float, events: int = 1, *, by_clock: bool = False) -> PollInterval:
        """Return the state after a poll that found events. ``by_clock``: no wake-up and no settlement caused it."""
        events = min(events, MOST_PER_POLL)
        again = now - self.events_since < CROWD_WITHIN
        events, since = (self.events + events, self.events_since) if again else (events, now)
        notified = self.notified and not (self.idle and by_clock)
        busy = now if self.busy_since is None else self.busy_since
        return replace(self.due(), empty_polls=0, notified=notified, events=events, events_since=since, busy_since=busy)

    def crowded(self, now: float) -> bool:
        """Return whether events come so often that writers should not notify."""
        return self.events >= CROWD or (self.busy_since is not None and now - self.busy_since >= CROWD_WITHIN)

    def quiet(self, now: float) -> PollInterval:
        """Return the state after a poll that found no events. If writers notify, the relay is idle at once."""
        since = now if self.quiet_since is None else self.quiet_since
        return replace(self, quiet_since=since, idle=self.idle or self.notified, busy_since=None)

    def should_idle(self, now: float) -> bool:
        """Return whether to become idle and request notifications."""
        return not self.idle and self.quiet_since is not None and now - self.quiet_since >= LINGER

    def idled(self) -> PollInterval:
        """Return the state after notifications were requested."""
        return replace(self, idle=True, empty_polls=0, events=0)

    def still_idle(self, undecided_writers: bool) -> PollInterval:
        """Return the state after an empty poll while idle."""
        return self if undecided_writers else replace(self, empty_polls=self.empty_polls + 1)

    def wait(self, last_tick: float) -> float:
        """Return the seconds until the next poll, if there is no wake-up and no settlement."""
        if self.quiet_since is None:
            return pause(last_tick)
        if not self.idle:
            return max(LINGER_POLL, pause(last_tick))
        doublings = max(0, self.empty_polls - self.settings.idle_after)
        return float(min(self.settings.poll * 2 ** min(doublings, 32), self.settings.longest))


def pause(last_tick: float) -> float:
    """Return the minimum time between two ticks."""
    return min(max(last_tick - SHORT, 0.0) * SHARE, LONGEST_PAUSE)
