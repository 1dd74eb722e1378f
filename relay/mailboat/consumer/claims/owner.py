"""Owners of claims, and the default times of all stores."""

import re
import secrets
import time
from typing import Final

DEFAULT_TTL: Final = 720 * 3600.0
"""Seconds for which an event is remembered."""
DEFAULT_LEASE: Final = 30.0
_NOT_IN_OWNER: Final = re.compile(r"[|:\s]")


def incarnation() -> str:
    """Return a name for this life of a process. Later lives sort behind earlier ones."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(3)}"


def owner_of(instance: str | None, life: str | None = None) -> str:
    """Return the owner of claims. Without an instance it is unique, and no restart takes its claims over early."""
    return f"{_NOT_IN_OWNER.sub('_', instance or secrets.token_hex(8))}:{life or incarnation()}"
