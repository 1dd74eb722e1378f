"""Numbers as people need them. Rounding twice changes nothing, and larger stays larger (or becomes equal)."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

_AGES: Final = tuple(
    [1, 2, 3, 5, 10, 15, 20, 30, 45]
    + [60 * minutes for minutes in (1, 2, 3, 5, 10, 15, 20, 30, 45)]
    + [3600 * hours for hours in (1, 2, 3, 4, 6, 8, 12, 18)]
    + [86400 * days for days in (1, 2, 3, 5, 7, 10, 14, 21, 30, 60, 90, 180, 365)]
)
_EXACT: Final = 100


def rounded_count(count: int) -> int:
    """Exact up to 100, then two significant digits, downwards."""
    if count <= _EXACT:
        return max(count, 0)
    step: int = 10 ** (len(str(count)) - 2)
    return count // step * step


def rounded_age(seconds: float | None) -> int | None:
    """The last full step: a growing age is news ever more rarely."""
    if seconds is None or seconds < _AGES[0]:
        return None
    return _AGES[bisect_right(_AGES, seconds) - 1]


def rounded_rate(rate: float) -> float:
    """Two significant digits; less than one event in ten seconds is none."""
    if rate < 0.1 or not math.isfinite(rate):
        return 0.0
    return float(f"{rate:.2g}")


def displayed(count: int, bounded: bool) -> str:
    """As kubectl prints it: a plus where counting stopped."""
    return f"{count}+" if bounded else str(count)
