"""Points in time as RFC 3339. One without a zone means something else on every machine, so it is refused."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Final

from pydantic import AwareDatetime, BeforeValidator

_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def _with_zone(value: object) -> object:
    """YAML parsers turn an unquoted time into a ``datetime``, JSON ones leave it a string: both are taken."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value
    if isinstance(value, str) and _RFC3339.fullmatch(value):
        return value
    raise ValueError('must be a date, a time and a zone: write it like "2026-01-31T12:00:00Z"')


Timestamp = Annotated[AwareDatetime, BeforeValidator(_with_zone)]
