"""The command line: ``mailboat run``, and what a person needs around it.

One module per group of commands. Commands read manifests, call async functions of the lower layers and print what they
say; they hold no logic of their own. The only package that imports click, and one of two that import rich.
"""

from __future__ import annotations

import sys


def start() -> None:
    """What ``mailboat`` calls. Everybody who emits gets that script, but only relays get what it needs."""
    try:
        from mailboat.cli.main import main
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "mailboat":
            raise
        sys.exit(f"mailboat: the command line needs {missing.name}, which is not installed: install mailboat[relay]")
    main()
