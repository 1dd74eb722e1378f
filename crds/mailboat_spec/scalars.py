"""Scalars of manifests that are parsed from text: durations, sizes, patterns and timestamps.

They are parsed once, at the edge; inner code uses seconds, bytes and ``datetime``. Durations have the notation of Go
(``720h``, ``1m30s``, ``1.5s``). Days are unsupported on purpose: neither Go's parser nor CEL's ``duration()`` in the
CRDs accepts them. Sizes have the notation of Kubernetes quantities (``10Gi``, ``1048576``), timestamps that of RFC
3339. A timestamp without a zone is refused: its meaning would depend on the machine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from mailboat_spec.rules import RULES, Constraint, Predicate, Rule, ValueCheck, int_or_string, read, rule, text


class ParsedText:
    """Base of immutable values that a manifest holds as text, which ``str`` returns."""

    __slots__ = ()
    json_schema: ClassVar[JsonSchemaValue]
    """Schema of the text, with its rules."""

    @classmethod
    def read(cls, value: object) -> Self:
        """Parse the value of a manifest. Raise ``ValueError`` with the remedy in its message."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.read(value),
            serialization=core_schema.to_string_ser_schema(),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return dict(cls.json_schema)


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
_PART: Final = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION_PATTERN: Final = f"^({_PART.pattern})+$"
_DAYS: Final = re.compile(r"([0-9]{1,6}) ?(d|w)(ays?|eeks?)?")
_BARE: Final = re.compile(r"[0-9]{1,12}(\.[0-9]*)?")
_LONGEST_DURATION: Final = 2**63 - 1  # nanoseconds, Go's own limit: about 292 years
_MAX_TEXT: Final = 64


@dataclass(frozen=True, slots=True, order=True)
class Duration(ParsedText):
    """A non-negative duration, exact to the nanosecond."""

    json_schema: ClassVar = {"type": "string", "pattern": _DURATION_PATTERN, "maxLength": _MAX_TEXT}

    nanoseconds: int

    def __post_init__(self) -> None:
        if not 0 <= self.nanoseconds <= _LONGEST_DURATION:
            raise ValueError("a duration lies between 0s and 2562047h")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Go's notation."""
        text = text.strip()
        if text == "0":
            return cls(0)
        if _BARE.fullmatch(text):
            raise ValueError(f'a duration needs a unit: write "{text}s" for seconds')
        if days := _DAYS.fullmatch(text):
            hours = int(days[1]) * (24 if days[2] == "d" else 168)
            raise ValueError(f'days and weeks are not known as units: write "{hours}h"')
        if len(text) > _MAX_TEXT or not re.fullmatch(_DURATION_PATTERN, text):
            raise ValueError('not a duration: write it like "720h", "1m30s" or "500ms" (units: h, m, s, ms, us, ns)')
        return cls(int(sum(Fraction(part[1].rstrip(".")) * _NANOSECONDS[part[3]] for part in _PART.finditer(text))))

    @classmethod
    def of_seconds(cls, seconds: float) -> Self:
        """Return the duration of a number of seconds, rounded to the nearest nanosecond."""
        return cls(round(seconds * 1_000_000_000))

    @property
    def seconds(self) -> float:
        return self.nanoseconds / 1_000_000_000

    def __str__(self) -> str:
        """Return the canonical form: each unit at most once, none with zero (``720h``, ``1m30s``, ``500ms``)."""
        if not self.nanoseconds:
            return "0s"
        hours, rest = divmod(self.nanoseconds, _NANOSECONDS["h"])
        minutes, rest = divmod(rest, _NANOSECONDS["m"])
        unit = next(unit for unit in ("s", "ms", "us", "ns") if self.nanoseconds >= _NANOSECONDS[unit])
        seconds = f"{Decimal(rest) / _NANOSECONDS[unit]:f}{unit}" if rest else ""
        return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "") + seconds

    @classmethod
    def read(cls, value: object) -> Self:
        if isinstance(value, str):
            return cls.parse(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        wrong = "a duration needs a unit" if is_number else "must be a duration"
        raise ValueError(f'{wrong}: write it like "30s", "500ms" or "720h"')


@dataclass(frozen=True, slots=True)
class DurationBounds(ValueCheck):
    """Annotation with the shortest and the longest duration of a field."""

    minimum: Duration
    maximum: Duration

    def check(self, value: Duration) -> Duration:
        if not self.minimum <= value <= self.maximum:
            raise ValueError(f"must be between {self.minimum} and {self.maximum}, not {value}")
        return value

    def rules(self) -> Iterator[Rule]:
        yield rule(
            f"{_is_duration('self')} && duration(self) >= duration('{self.minimum}') "
            f"&& duration(self) <= duration('{self.maximum}')",
            f"must be a duration between {self.minimum} and {self.maximum} (units: h, m, s, ms, us, ns)",
        )


def _is_duration(subject: str) -> str:
    return f"{subject}.matches({text(_DURATION_PATTERN)})"


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


_BINARY: Final = {suffix: 1024**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)}
_DECIMAL: Final = {suffix: 1000**power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)}
_FACTORS: Final = {"": 1, **_BINARY, **_DECIMAL}
_SIZE_PATTERN: Final = r"^[0-9]{1,19}(\.[0-9]{1,9})?([kMGTPE]|[KMGTPE]i)?$"
_LARGEST_SIZE: Final = 2**63 - 1
_NO_SIZE: Final = 'not a size: write it like "10Gi", "500M" or "1048576" (no B at the end)'


@dataclass(frozen=True, slots=True, order=True)
class Size(ParsedText):
    """A number of bytes."""

    json_schema: ClassVar = int_or_string(
        f"self.matches({text(_SIZE_PATTERN)})", _NO_SIZE, maxLength=32, pattern=_SIZE_PATTERN
    )

    bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.bytes <= _LARGEST_SIZE:
            raise ValueError("a size lies between 0 and 8Ei bytes")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Kubernetes' notation, rounding a fraction of a byte up. Raise ``ValueError`` with the remedy."""
        text = text.strip()
        match = re.fullmatch(_SIZE_PATTERN, text)
        if not match:
            raise ValueError(_NO_SIZE)
        suffix = match[2] or ""
        return cls(ceil(Fraction(text.removesuffix(suffix)) * _FACTORS[suffix]))

    def __str__(self) -> str:
        """Return the canonical form: the largest suffix that leaves a whole number, binary suffixes first."""
        if self.bytes:
            for factors in (_BINARY, _DECIMAL):
                for suffix, factor in reversed(factors.items()):
                    if self.bytes % factor == 0:
                        return f"{self.bytes // factor}{suffix}"
        return str(self.bytes)

    @classmethod
    def read(cls, value: object) -> Self:
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(value)
        raise ValueError('must be a size: write it like "10Gi", "500M" or "1048576"')


_LONGEST_PATTERN: Final = 512
_EMPTY_PATTERN: Final = 'an empty pattern matches nothing: remove it, or write "*" to match everything'
_CHARACTER_CLASSES: Final = "character classes ([...]) are not supported: use * and ?, or list several patterns"
_NUL_CHARACTER: Final = "a pattern can't contain the NUL character: Postgres has no such text"
_WILDCARDS: Final = re.compile(r"[*?]")
_LIKE: Final = str.maketrans({"*": "%", "?": "_", "%": r"\%", "_": r"\_", "\\": r"\\"})


@dataclass(frozen=True, slots=True)
class Pattern(ParsedText):
    """A shell-style pattern: ``*`` is any run of characters, ``?`` is exactly one. Case matters; the whole must match.

    Has the same meaning in Python and as a ``LIKE`` in the SQL that reads the outbox. Character classes (``[a-z]``),
    which ``LIKE`` lacks, are therefore refused. All other characters, backslashes and dots included, are literal.
    """

    json_schema: ClassVar = {
        "type": "string",
        "maxLength": _LONGEST_PATTERN,
        "pattern": r"^[^\[\x00]+$",
        RULES: [
            rule("self != ''", _EMPTY_PATTERN),
            rule("!self.contains('[')", _CHARACTER_CLASSES),
            rule(r"!self.contains('\x00')", _NUL_CHARACTER),
        ],
    }

    text: str
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError(_EMPTY_PATTERN)
        if "[" in self.text:
            raise ValueError(f'"{self.text}": {_CHARACTER_CLASSES}')
        if "\0" in self.text:
            raise ValueError(_NUL_CHARACTER)
        if len(self.text) > _LONGEST_PATTERN:
            raise ValueError(f"a pattern has at most {_LONGEST_PATTERN} characters")
        object.__setattr__(self, "_compiled", _compile(self.text))

    @property
    def is_literal(self) -> bool:
        """Whether the pattern has no wildcard, so that equality (and an index) suffices."""
        return _WILDCARDS.search(self.text) is None

    def matches(self, value: str) -> bool:
        """Return whether the whole of ``value`` matches."""
        return self._compiled.fullmatch(value) is not None

    def like(self) -> str:
        r"""Return the equivalent SQL ``LIKE`` pattern with the default escape character, ``\``."""
        return self.text.translate(_LIKE)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def read(cls, value: object) -> Self:
        if isinstance(value, str):
            return cls(value)
        raise ValueError("must be a pattern: put it in quotes")


def _compile(text: str) -> re.Pattern[str]:
    """Return a regular expression that can't backtrack into exponential (or even quadratic) time.

    The text between two stars has a fixed length, so its first occurrence is as good as any later one. An atomic group
    matches it without backtracking.
    """
    first, *rest = (
        "".join("." if character == "?" else re.escape(character) for character in run)
        for run in re.split(r"\*+", text)
    )
    if not rest:
        return re.compile(first, re.DOTALL)
    *middle, last = rest
    return re.compile(first + "".join(f"(?>.*?{run})" for run in middle) + ".*" + last, re.DOTALL)


_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_NO_TIMESTAMP: Final = 'must be a date, a time and a zone: write it like "2026-01-31T12:00:00Z"'

_IN_CRD: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$"
"""The subset of RFC 3339 that the API server's parser accepts."""


def _with_zone(value: object) -> object:
    """Accept both ``datetime`` (an unquoted time in YAML) and string (JSON), each with a zone."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value
    if isinstance(value, str) and _RFC3339.fullmatch(value):
        return value
    raise ValueError(_NO_TIMESTAMP)


def _in_utc(value: datetime) -> datetime:
    """Normalise to UTC: times in zones with daylight saving time can't be compared reliably."""
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("must lie between the years 1 and 9999, in UTC") from None


_IN_CEL: Final = rule(f"self.matches({text(_IN_CRD)}) && timestamp(self).getFullYear() > 0", _NO_TIMESTAMP)

Timestamp = Annotated[
    datetime,
    BeforeValidator(_with_zone),
    AfterValidator(_in_utc),
    WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64, RULES: [_IN_CEL]}),
]
