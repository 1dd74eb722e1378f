"""Compute the merge patch between two statuses; None if nothing changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SLOW: Final = frozenset({"rate"})
"""Fields that change constantly while events flow: on their own they are patched only now and then."""


def status_patch(
    before: Mapping[str, Any], after: Mapping[str, Any], *, only_counters_may: bool
) -> dict[str, Any] | None:
    """Return the patch, or None. A removed field is set to null, as merge patches require."""
    patch: dict[str, Any] = {key: value for key, value in after.items() if before.get(key) != value}
    patch.update({key: None for key in before if key not in after})
    if not patch or (not only_counters_may and patch.keys() <= _SLOW):
        return None
    return patch
