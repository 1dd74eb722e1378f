"""Steps of the demo: events flow, one is refused, a relay is killed, the cause is fixed, the dead letter replayed."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from mailboat_demo.application import LARGE_ORDER, LARGE_TYPE, SLOW_ORDER, Shop
from mailboat_demo.consumer import ReceivedMessages
from mailboat_demo.effects import EffectsProcess
from mailboat_demo.relays import MAILBOAT, RelayGlance, RelayProcess
from mailboat_demo.screen import Screen, ScreenView, Seen
from mailboat_demo.servers import LARGE_LIMIT, PARTITIONS, TOPIC, DemoServers
from mailboat_demo.verification import Verification, verify_delivery

_PATIENCE: Final = 120.0
_POLL: Final = 0.02
_VIEW_EVERY: Final = 0.25


class DemoFailed(Exception):
    """An expected step of the demo did not happen."""


@dataclass(frozen=True, slots=True)
class Length:
    """Duration between two incidents, and the load."""

    scene_seconds: float = 3.0
    writers: int = 4
    per_second: float = 400.0


SHORT: Final = Length(scene_seconds=0.5, writers=4, per_second=200.0)


class Scenario:
    """The processes of the demo and its steps."""

    def __init__(self, scene: DemoServers, screen: Screen, length: Length, stack: ExitStack) -> None:
        self._scene = scene
        self._screen = screen
        self._length = length
        self._stack = stack
        self._relays: list[RelayProcess] = []
        self._shop = Shop(scene.database_url, writers=length.writers, per_second=length.per_second, seed=1)
        self._inbox = ReceivedMessages(scene.bootstrap, TOPIC)
        self._effects = EffectsProcess(scene.database_url, scene.folder)
        stack.callback(self._effects.close)
        stack.callback(self._inbox.close)
        stack.callback(self._shop.close)

    def play(self) -> Verification:
        """Run all steps, from the first relay to the proof."""
        first, second = self._begin()
        self._flow()
        self._refuse_an_event()
        self._kill(first, survivor=second)
        self._mend(second)
        return self._reckon()

    def _begin(self) -> tuple[RelayProcess, RelayProcess]:
        first, second = self._start("relay-1"), self._start("relay-2")
        self._screen.say(f"Two relays start; they make the outbox and share {PARTITIONS} partitions.")
        self._until(lambda: _shares(first, second), "two relays that share all partitions")
        self._shop.open()
        self._watch()
        self._screen.say("The application changes orders and emits an event with each, in one transaction.")
        self._screen.say("One of its transactions stays open from now on. It delays nobody.")
        self._effects.begin()
        self._screen.say(
            "A consumer without a broker pulls the same events. It is killed in its handler again and again."
        )
        return first, second

    def _flow(self) -> None:
        self._until(lambda: self._inbox.distinct > 0, "the first event at the consumer")
        time.sleep(self._length.scene_seconds)

    def _refuse_an_event(self) -> None:
        self._shop.export()
        self._shop.change(LARGE_ORDER)
        self._screen.say(f"A poison event: {LARGE_TYPE} of {LARGE_ORDER} is larger than the relays may send.")
        self._until(lambda: self._view().dead > 0, "the dead letter")
        self._until(lambda: self._inbox.has(LARGE_ORDER, replay=False), "the next event of its key")
        self._screen.say("It was dead-lettered, and its key went on. $ mailboat dlq list")
        for line in self._mailboat("dlq", "list"):
            self._screen.say(f"  {line}")
        time.sleep(self._length.scene_seconds)

    def _kill(self, victim: RelayProcess, survivor: RelayProcess) -> None:
        held = _owned(victim)
        victim.kill()
        killed_at = time.monotonic()
        self._screen.say(f"kill -9 {victim.name}, which held {len(held)} partitions.")
        self._until(lambda: _owns_all(survivor), f"{survivor.name} to take over")
        self._screen.say(f"{survivor.name} took over after {time.monotonic() - killed_at:.1f} s.")
        time.sleep(self._length.scene_seconds)

    def _mend(self, survivor: RelayProcess) -> None:
        self._scene.limit_messages(LARGE_LIMIT)
        self._screen.say("The cause is corrected: a larger message.max.bytes in the manifest.")
        newcomer = self._start("relay-3")
        self._until(lambda: _shares(survivor, newcomer), f"{newcomer.name} to get its share")
        self._screen.say(f"{newcomer.name} was started with it, and got its share. {survivor.name} restarts, in order.")
        survivor.restart()
        self._until(lambda: _shares(survivor, newcomer), "the relays to share again")
        (answer, *_) = self._mailboat("dlq", "replay", "--type", LARGE_TYPE)
        self._screen.say(f"$ mailboat dlq replay --type {LARGE_TYPE}: {answer}")
        self._until(lambda: self._inbox.has(LARGE_ORDER, replay=True), "the replayed event")
        self._screen.say("The dead letter came back to life: the consumer has it.")
        time.sleep(self._length.scene_seconds)

    def _reckon(self) -> Verification:
        self._shop.stop()
        self._screen.say(f"The application stops. The transaction on {SLOW_ORDER} commits at last.")
        book = self._shop.book()
        try:
            self._until(lambda: self._inbox.distinct >= len(book), "the last events")
        except DemoFailed as failure:
            self._screen.say(str(failure))  # the proof reports the number of lost events
        self._inbox.close()
        self._until(lambda: self._effects.counted()[1] >= len(book), "the last effects")
        effects, events = self._effects.counted()
        self._screen.say(
            f"{effects} effects of {events} events, each once; killed in the handler {self._effects.deaths} times."
        )
        if effects != events or events != len(book):
            raise DemoFailed(f"{len(book)} events were committed, and had {effects} effects, of {events} of them")
        return verify_delivery(book, self._inbox.arrivals)

    # -- processes and waiting ---------------------------------------------------------------------------------------

    def _start(self, name: str) -> RelayProcess:
        relay = RelayProcess(name, self._scene.manifest, self._scene.folder)
        self._stack.callback(relay.kill)
        self._relays.append(relay)
        relay.launch()
        return relay

    def _mailboat(self, *arguments: str) -> list[str]:
        """Run a command as a user would and return its output."""
        command = [*MAILBOAT, *arguments, "-f", str(self._scene.manifest)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise DemoFailed(f"mailboat {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout.splitlines() or [""]

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if failure := self._shop.failure or self._inbox.failure:
                raise DemoFailed(f"the application or the consumer failed: {failure}") from failure
            if time.monotonic() > deadline:
                logs = "\n".join(relay.log_tail(5) for relay in self._relays)
                raise DemoFailed(f"waited {_PATIENCE:.0f} s in vain for {what}.\n{logs}")
            time.sleep(_POLL)

    def _watch(self) -> None:
        """Show views from a separate thread until the demo ends."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_VIEW_EVERY):
                self._screen.show(self._view())

        thread = threading.Thread(target=watch, name="demo-watch", daemon=True)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(over.set)

    def _view(self) -> ScreenView:
        relays = tuple(Seen(relay.name, relay.glance(), relay.running) for relay in self._relays)
        shop, inbox = self._shop, self._inbox
        return ScreenView(shop.committed, shop.rolled_back, inbox.distinct, inbox.duplicates, relays)


def _owned(relay: RelayProcess) -> tuple[int, ...]:
    glance = relay.glance()
    return glance.owned if glance is not None else ()


def _owns_all(relay: RelayProcess) -> bool:
    glance = relay.glance()
    return glance is not None and glance.owns_all


def _shares(*relays: RelayProcess) -> bool:
    """Return whether each relay owns partitions, and all together own every partition."""
    glances: list[RelayGlance | None] = [relay.glance() for relay in relays]
    owned = [glance.owned for glance in glances if glance is not None]
    return len(owned) == len(relays) and all(owned) and sum(map(len, owned)) == PARTITIONS
