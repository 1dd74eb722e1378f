"""Durations in the notation of Go and Kubernetes: ``720h``, ``500ms``, ``1m30s``, ``1.5s``.

Durations are parsed once, at the edge; inner code uses seconds. Days are unsupported on purpose: neither Go's parser
nor CEL's ``duration()`` in the CRDs accepts them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from mailboat_spec.rules import RULES, Constraint, Predicate, Rule, read, text

_NANOSECONDS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # the micro sign
    "μs": 1_000,  # the Greek letter
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DAYS: Final = re.compile(r"([0-9]{1,6}) ?(d|w)(ays?|eeks?)?")
_BARE: Final = re.compile(r"[0-9]{1,12}(\.[0-9]*)?")
_LONGEST: Final = 2**63 - 1  # nanoseconds, Go's own limit: about 292 years
_MAX_TEXT: Final = 64

SCHEMA_PATTERN: Final = r"^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$"
"""The same grammar for the CRDs."""


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """A non-negative duration, exact to the nanosecond."""

    nanoseconds: int

    def __post_init__(self) -> None:
        if not 0 <= self.nanoseconds <= _LONGEST:
            raise ValueError("a duration lies between 0s and 2562047h")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Go's notation. Raise ``ValueError`` with the remedy in its message."""
        text = text.strip()
        if text == "0":
            return cls(0)
        if _BARE.fullmatch(text):
            raise ValueError(f'a duration needs a unit: write "{text}s" for seconds')
        if days := _DAYS.fullmatch(text):
            hours = int(days[1]) * (24 if days[2] == "d" else 168)
            raise ValueError(f'days and weeks are not known as units: write "{hours}h"')
        total, end = Fraction(0), 0
        if len(text) <= _MAX_TEXT:
            while part := _PART.match(text, end):
                total += Fraction(part[1].rstrip(".")) * _NANOSECONDS[part[2]]
                end = part.end()
        if not text or end != len(text):
            raise ValueError('not a duration: write it like "720h", "1m30s" or "500ms" (units: h, m, s, ms, us, ns)')
        return cls(int(total))

    @classmethod
    def of_seconds(cls, seconds: float) -> Self:
        """Return the duration of a number of seconds, rounded to the nearest nanosecond."""
        return cls(round(seconds * 1_000_000_000))

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.nanoseconds / 1_000_000_000

    def __str__(self) -> str:
        """Return the canonical form: each unit at most once, none with zero (``720h``, ``1m30s``, ``500ms``)."""
        if self.nanoseconds < _NANOSECONDS["s"]:
            for unit in ("ms", "us"):
                if self.nanoseconds >= _NANOSECONDS[unit]:
                    return _decimal(self.nanoseconds, unit)
            return f"{self.nanoseconds}ns" if self.nanoseconds else "0s"
        hours, rest = divmod(self.nanoseconds, _NANOSECONDS["h"])
        minutes, rest = divmod(rest, _NANOSECONDS["m"])
        return "".join(
            (f"{hours}h" if hours else "", f"{minutes}m" if minutes else "", _decimal(rest, "s") if rest else "")
        )

    @classmethod
    def _validate(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError('a duration needs a unit: write it like "30s", "500ms" or "720h"')
        raise ValueError('must be a duration: write it like "30s", "500ms" or "720h"')

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "pattern": SCHEMA_PATTERN, "maxLength": _MAX_TEXT}


def _decimal(nanoseconds: int, unit: str) -> str:
    whole, rest = divmod(nanoseconds, _NANOSECONDS[unit])
    if not rest:
        return f"{whole}{unit}"
    digits = str(_NANOSECONDS[unit] + rest)[1:].rstrip("0")
    return f"{whole}.{digits}{unit}"


@dataclass(frozen=True, slots=True)
class DurationBounds:
    """Annotation with the shortest and the longest duration of a field, for pydantic and for the CRD."""

    minimum: Duration
    maximum: Duration

    def check(self, value: Duration) -> Duration:
        """Return the value, or raise ``ValueError`` if it is out of bounds."""
        if not self.minimum <= value <= self.maximum:
            raise ValueError(f"must be between {self.minimum} and {self.maximum}, not {value}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        within = (
            f"{_is_duration('self')} && duration(self) >= duration('{self.minimum}') "
            f"&& duration(self) <= duration('{self.maximum}')"
        )
        message = f"must be a duration between {self.minimum} and {self.maximum} (units: h, m, s, ms, us, ns)"
        return {**handler(schema), RULES: [Rule(within, message).as_schema()]}


def _is_duration(subject: str) -> str:
    return f"{subject}.matches({text(SCHEMA_PATTERN)})"


def at_most(path: str, other: str) -> Predicate:
    """One duration is at most the other. Also true for an invalid duration, which another rule refuses."""
    first, second = f"self.{path}", f"self.{other}"
    cel = f"!{_is_duration(first)} || !{_is_duration(second)} || duration({first}) <= duration({second})"
    return Predicate(cel, lambda model: bool(read(model, path) <= read(model, other)))


def not_longer(field: str, than: str) -> Constraint:
    """Return the constraint that one duration is at most the other."""
    remedy = f"make it shorter or raise {than}"
    return Constraint(
        field,
        f"is longer than {than}: {remedy}",
        at_most(field, than),
        detailed=f"is {{{field}}}, longer than {than} ({{{than}}}): {remedy}",
    )


def between(minimum: str, maximum: str) -> DurationBounds:
    """Return bounds for ``Annotated[Duration, between("1s", "10m")]``."""
    return DurationBounds(Duration.parse(minimum), Duration.parse(maximum))
