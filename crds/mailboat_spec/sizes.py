"""Sizes in bytes in the notation of Kubernetes quantities: ``10Gi``, ``500M``, ``1048576``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from mailboat_spec.rules import RULES, Rule, text

_BINARY: Final = {suffix: 1024**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)}
_DECIMAL: Final = {suffix: 1000**power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)}
_FACTORS: Final = {"": 1, **_BINARY, **_DECIMAL}
_SIZE: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)([kMGTPE]|[KMGTPE]i)?")
_LARGEST: Final = 2**63 - 1
_MAX_TEXT: Final = 32
_MESSAGE: Final = 'not a size: write it like "10Gi", "500M" or "1048576" (no B at the end)'

SCHEMA_PATTERN: Final = r"^[0-9]{1,19}(\.[0-9]{1,9})?([kMGTPE]|[KMGTPE]i)?$"
"""The same grammar for the CRDs."""


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """A number of bytes."""

    bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.bytes <= _LARGEST:
            raise ValueError("a size lies between 0 and 8Ei bytes")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Kubernetes' notation, rounding a fraction of a byte up. Raise ``ValueError`` with the remedy."""
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise ValueError(_MESSAGE)
        exact = Fraction(match[1]) * _FACTORS[match[2] or ""]
        return cls(-(-exact.numerator // exact.denominator))

    def __str__(self) -> str:
        """Return the canonical form: the largest suffix that leaves a whole number, binary suffixes first."""
        if self.bytes:
            for factors in (_BINARY, _DECIMAL):
                for suffix, factor in reversed(factors.items()):
                    if self.bytes % factor == 0:
                        return f"{self.bytes // factor}{suffix}"
        return str(self.bytes)

    @classmethod
    def _validate(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(value)
        raise ValueError('must be a size: write it like "10Gi", "500M" or "1048576"')

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": _MAX_TEXT,
            "pattern": SCHEMA_PATTERN,
            "x-kubernetes-int-or-string": True,
            RULES: [Rule(f"type(self) == int || self.matches({text(SCHEMA_PATTERN)})", _MESSAGE).as_schema()],
        }
