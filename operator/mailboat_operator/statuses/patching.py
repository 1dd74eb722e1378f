"""The difference between a status and the one that is there, as a merge patch; nothing where nothing changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SLOW: Final = frozenset({"published", "rate"})
"""Counters that move all the time while events flow: alone they are worth a patch only now and then."""


def status_patch(
    before: Mapping[str, Any], after: Mapping[str, Any], *, only_counters_may: bool
) -> dict[str, Any] | None:
    """What to send, or None. Fields that are gone are removed by null, as merge patches want it."""
    patch: dict[str, Any] = {key: value for key, value in after.items() if before.get(key) != value}
    patch.update({key: None for key in before if key not in after})
    if not patch or (not only_counters_may and patch.keys() <= _SLOW):
        return None
    return patch
