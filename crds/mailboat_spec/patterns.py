"""Shell-style patterns over event and aggregate types: ``*`` is any run of characters, ``?`` is exactly one.

A pattern must have the same meaning in Python and as a ``LIKE`` in the SQL that reads the outbox. Character classes
(``[a-z]``), which ``LIKE`` lacks, are therefore refused. All other characters, backslashes and dots included, are
literal. Case matters; the whole string must match.
"""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Final, Self

from mailboat_spec.rules import RULES, Rule
from mailboat_spec.scalars import ParsedText

MAX_LENGTH: Final = 512
_EMPTY: Final = 'an empty pattern matches nothing: remove it, or write "*" to match everything'
_CLASSES: Final = "character classes ([...]) are not supported: use * and ?, or list several patterns"
_NUL: Final = "a pattern can't contain the NUL character: Postgres has no such text"
_WILDCARDS: Final = re.compile(r"[*?]")
_LIKE: Final = str.maketrans({"*": "%", "?": "_", "%": r"\%", "_": r"\_", "\\": r"\\"})


@dataclass(frozen=True, slots=True)
class Pattern(ParsedText):
    """One pattern, checked and compiled once. ``Pattern("order.*").matches("order.placed")``."""

    json_schema: ClassVar = {
        "type": "string",
        "maxLength": MAX_LENGTH,
        "pattern": r"^[^\[\x00]+$",
        RULES: [
            Rule("self != ''", _EMPTY).as_schema(),
            Rule("!self.contains('[')", _CLASSES).as_schema(),
            Rule(r"!self.contains('\x00')", _NUL).as_schema(),
        ],
    }

    text: str
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError(_EMPTY)
        if "[" in self.text:
            raise ValueError(f'"{self.text}": {_CLASSES}')
        if "\0" in self.text:
            raise ValueError(_NUL)
        if len(self.text) > MAX_LENGTH:
            raise ValueError(f"a pattern has at most {MAX_LENGTH} characters")
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
