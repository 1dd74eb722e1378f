"""Waits of the shop for locks of relays, from the log of Postgres. Pure.

A slow transaction alone does not prove a lock wait, since an overloaded machine slows down everything. With
``log_lock_waits`` the server logs each lock wait of more than a second with the processes that hold the lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_SERVER_START = re.compile(r"LOG:  starting PostgreSQL ")
_CONNECTED = re.compile(r"\[(?P<pid>\d+)\] LOG:  connection authorized: .*?application_name=(?P<name>.*?)(?: SSL .*)?$")
_WAITS = re.compile(r"LOG:  process (?P<pid>\d+) still waiting for ")
_HOLDERS = re.compile(r"\[(?P<pid>\d+)\] DETAIL:  Process(?:es)? holding the lock: (?P<holders>[\d, ]+)\.")


def sessions(log: Iterable[str]) -> set[str]:
    """Application names of all logged connections."""
    return {connected["name"] for line in log if (connected := _CONNECTED.search(line))}


def waits_behind(ours: str, theirs: str, log: Iterable[str]) -> Iterator[str]:
    """Yield each wait of a session named ``theirs…`` for a lock of a session named ``ours…``."""
    names: dict[str, str] = {}
    wait = ""
    for line in log:
        if _SERVER_START.search(line):
            names.clear()  # process ids of the previous server
        elif connected := _CONNECTED.search(line):
            names[connected["pid"]] = connected["name"]
        elif _WAITS.search(line):
            wait = line
        elif held := _HOLDERS.search(line):
            holders = [names.get(pid.strip(), "") for pid in held["holders"].split(",")]
            if names.get(held["pid"], "").startswith(theirs) and any(name.startswith(ours) for name in holders):
                yield f"{wait} behind {', '.join(holders)}"
