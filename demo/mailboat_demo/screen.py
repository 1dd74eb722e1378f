"""Output of the demo: a live screen on a terminal, plain lines with the time elsewhere. Both have the same content."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mailboat_demo.relays import RelayGlance

_LINES_KEPT: Final = 14
_FRAMES_PER_SECOND: Final = 8
_PLAIN_EVERY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Displayed state of one relay."""

    name: str
    glance: RelayGlance | None
    running: bool

    @property
    def state(self) -> str:
        if self.glance is None:
            return "does not answer" if self.running else "dead"
        return "partitions " + (" ".join(map(str, self.glance.owned)) or "none")


@dataclass(frozen=True, slots=True)
class ScreenView:
    """Displayed values at one moment."""

    committed: int
    rolled_back: int
    received: int
    duplicates: int
    relays: tuple[Seen, ...]

    @property
    def on_the_way(self) -> int:
        return max(self.committed - self.received, 0)

    @property
    def dead(self) -> int:
        return max((relay.glance.dead for relay in self.relays if relay.glance is not None), default=0)


class Screen(Protocol):
    """Output that accepts lines at any time, and periodic views."""

    def say(self, line: str) -> None: ...

    def show(self, view: ScreenView) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainScreen:
    """Prints line by line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._shown_at = clock()

    def say(self, line: str) -> None:
        print(f"{self._clock() - self._began:6.1f} s  {line}", flush=True)

    def show(self, view: ScreenView) -> None:
        if self._clock() - self._shown_at >= _PLAIN_EVERY:
            self._shown_at = self._clock()
            self.say(f"  {summary(view)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveScreen:
    """Redraws in place. The printed lines of the scenario stay on the terminal at the end."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._console = console
        self._lines: deque[Text] = deque(maxlen=_LINES_KEPT)
        self._all_lines: list[Text] = []
        self._view: ScreenView | None = None
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=_FRAMES_PER_SECOND, transient=True
        )

    def say(self, line: str) -> None:
        stamped = Text.assemble(
            (f"{self._clock() - self._began:6.1f} s  ", "dim"), line, overflow="ellipsis", no_wrap=True
        )
        self._lines.append(stamped)
        self._all_lines.append(stamped)

    def show(self, view: ScreenView) -> None:
        self._view = view

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        for line in self._all_lines:
            self._console.print(line, soft_wrap=True)

    def _render(self) -> Group:
        story = Panel(Group(*self._lines), title="what happens", title_align="left", border_style="blue")
        return Group(_flow(self._view), story) if self._view is not None else Group(story)


def summary(view: ScreenView) -> str:
    """Format a view as one line."""
    relays = ", ".join(f"{relay.name}: {relay.state}" for relay in view.relays)
    return (
        f"committed {view.committed}, rolled back {view.rolled_back}, received {view.received}"
        f" (on the way {view.on_the_way}, duplicates {view.duplicates}), dead letters {view.dead}; {relays}"
    )


def _flow(view: ScreenView) -> Table:
    table = Table.grid(expand=True, padding=(0, 2))
    table.add_column()
    table.add_column(ratio=1)
    table.add_column(justify="right")
    application = f"{view.committed} changes committed, {view.rolled_back} rolled back"
    table.add_row(Text("application", style="bold"), application, "")
    for relay in view.relays:
        style = "red" if relay.glance is None else "green"
        published = "" if relay.glance is None else f"published {relay.glance.published}, lag {relay.glance.lag}"
        table.add_row(Text(relay.name, style=f"bold {style}"), Text(relay.state, style=style), published)
    received = f"{view.received} events received, {view.duplicates} duplicates"
    table.add_row(Text("consumer", style="bold"), received, f"on the way {view.on_the_way}")
    dead = Text(str(view.dead), style="yellow" if view.dead else "")
    table.add_row(Text("dead letters", style="bold"), dead, "")
    return table
