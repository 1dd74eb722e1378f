"""The command line: ``mailboat run`` and the commands for administration.

One module per group of commands. Commands read manifests, call async functions of the lower layers and print the
results; they contain no logic. The only package that imports click, and one of two that import rich.
"""

import sys
from contextlib import nullcontext
from typing import Final

from mailboat.runtime.shutdown import exit_on_signals

_SERVICES: Final = ("run", "consume")
"""Commands that end with 0 at a signal. A job that was stopped must not end as if it were done."""


def start() -> None:
    """Entry point of the ``mailboat`` script. Installed with every emitter, but its dependencies only with relays."""
    command = next((each for each in sys.argv[1:] if not each.startswith("-")), None)
    with exit_on_signals() if command in _SERVICES else nullcontext():
        try:
            from mailboat.cli.main import main
        except ModuleNotFoundError as missing:
            if missing.name is None or missing.name.partition(".")[0] == "mailboat":
                raise
            sys.exit(
                f"mailboat: the command line needs {missing.name}, which is not installed: install mailboat[relay]"
            )
        main()
