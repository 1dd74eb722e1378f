"""``python -m mailboat_demo``: the demo as a program. Exit code 0 only if the proof holds."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from types import FrameType

from rich.console import Console

from mailboat_demo.scenario import SHORT, DemoFailed, Length, Scenario
from mailboat_demo.screen import LiveScreen, PlainScreen, Screen
from mailboat_demo.servers import start_servers
from mailboat_devservers.errors import PartMissing, ServerFailed


def main() -> int:
    options = _options()
    for ending in (signal.SIGINT, signal.SIGTERM):  # also if the shell started this process with SIGINT ignored
        signal.signal(ending, _interrupt)
    console = Console()
    screen: Screen = LiveScreen(console) if console.is_terminal and not options.plain else PlainScreen()
    try:
        with ExitStack() as stack:
            stack.enter_context(screen)
            scene = start_servers(stack, options.broker, screen.say)
            proof = Scenario(scene, screen, SHORT if options.short else Length(), stack).play()
    except KeyboardInterrupt:
        print("Interrupted; everything was stopped and removed.", file=sys.stderr)
        return 130
    except (DemoFailed, PartMissing, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    console.print(f"{'PROOF' if proof.holds else 'THE PROOF FAILED'}: {proof}", soft_wrap=True, highlight=False)
    return 0 if proof.holds else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mailboat_demo", description="Watch events flow, a relay die, nothing lost.")
    parser.add_argument("--short", action="store_true", help="as short as it can be")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
    parser.add_argument(
        "--broker", choices=("auto", "kfake", "mock"), default="auto", help="auto: kfake, or a mock where Go is missing"
    )
    return parser.parse_args()


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
