"""Who made the shop wait for a lock, by Postgres' own log. Pure.

A shop that merely takes long says nothing about whose fault it was; a machine with far too much to do makes everything
slow. The server knows, and with ``log_lock_waits`` it tells of each wait of more than a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_NEW_LIFE = re.compile(r"LOG:  starting PostgreSQL ")
_CONNECTED = re.compile(r"\[(?P<pid>\d+)\] LOG:  connection authorized: .*?application_name=(?P<name>.*?)(?: SSL .*)?$")
_WAITS = re.compile(r"LOG:  process (?P<pid>\d+) still waiting for ")
_HOLDERS = re.compile(r"\[(?P<pid>\d+)\] DETAIL:  Process(?:es)? holding the lock: (?P<holders>[\d, ]+)\.")


def sessions(log: Iterable[str]) -> set[str]:
    """The names of all applications that ever connected: whose waits can be told at all."""
    return {connected["name"] for line in log if (connected := _CONNECTED.search(line))}


def waits_behind(ours: str, theirs: str, log: Iterable[str]) -> Iterator[str]:
    """Every wait of a session whose application's name begins with ``theirs`` behind one that begins with ``ours``."""
    names: dict[str, str] = {}
    wait = ""
    for line in log:
        if _NEW_LIFE.search(line):
            names.clear()  # processes are numbered anew
        elif connected := _CONNECTED.search(line):
            names[connected["pid"]] = connected["name"]
        elif _WAITS.search(line):
            wait = line
        elif held := _HOLDERS.search(line):
            holders = [names.get(pid.strip(), "") for pid in held["holders"].split(",")]
            if names.get(held["pid"], "").startswith(theirs) and any(name.startswith(ours) for name in holders):
                yield f"{wait} behind {', '.join(holders)}"
