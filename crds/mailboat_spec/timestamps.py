"""RFC 3339 timestamps. A timestamp without a zone is refused: its meaning would depend on the machine."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Final

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, WithJsonSchema

from mailboat_spec.rules import RULES, Rule, text

_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_MESSAGE: Final = 'must be a date, a time and a zone: write it like "2026-01-31T12:00:00Z"'
_MAX_TEXT: Final = 64

SCHEMA_PATTERN: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$"
"""The subset of RFC 3339 that the API server's parser accepts."""


def _with_zone(value: object) -> object:
    """Accept both ``datetime`` (an unquoted time in YAML) and string (JSON), each with a zone."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value
    if isinstance(value, str) and _RFC3339.fullmatch(value):
        return value
    raise ValueError(_MESSAGE)


def _in_utc(value: datetime) -> datetime:
    """Normalise to UTC: times in zones with daylight saving time can't be compared reliably."""
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("must lie between the years 1 and 9999, in UTC") from None


_IN_CEL: Final = Rule(f"self.matches({text(SCHEMA_PATTERN)}) && timestamp(self).getFullYear() > 0", _MESSAGE)

Timestamp = Annotated[
    AwareDatetime,
    BeforeValidator(_with_zone),
    AfterValidator(_in_utc),
    WithJsonSchema({"type": "string", "format": "date-time", "maxLength": _MAX_TEXT, RULES: [_IN_CEL.as_schema()]}),
]
