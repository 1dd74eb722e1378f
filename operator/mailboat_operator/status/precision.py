"""Round numbers for display. Rounding is idempotent and monotonic."""

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
    """Exact up to 100, then rounded down to two significant digits."""
    if count <= _EXACT:
        return max(count, 0)
    step: int = 10 ** (len(str(count)) - 2)
    return count // step * step


def rounded_age(seconds: float | None) -> int | None:
    """Round down to the last full step, so that a growing age changes the status ever more rarely."""
    if seconds is None or seconds < _AGES[0]:
        return None
    return _AGES[bisect_right(_AGES, seconds) - 1]


def rounded_rate(rate: float) -> float:
    """Round to two significant digits; less than one event in ten seconds counts as 0."""
    if rate < 0.1 or not math.isfinite(rate):
        return 0.0
    return float(f"{rate:.2g}")


def displayed(count: int, bounded: bool) -> str:
    """Format for kubectl, with a plus sign if counting stopped at a bound."""
    return f"{count}+" if bounded else str(count)
