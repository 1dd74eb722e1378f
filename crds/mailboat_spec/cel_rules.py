"""CEL rules that the API server evaluates: the equivalent of the Python checks of the models.

Constraints between fields are defined once for both (``constraints``). Checks that it can't express are overrides of
``wrong_combinations`` in Python and of ``admission_rules`` in CEL, with the same messages. Types with a stricter format
than a string (durations, names of topics) define their own rules.

The API server limits the estimated cost of a rule before it accepts a CRD. Strings, lists and mappings of the models
therefore have maximum lengths. This module owns the form of rules and the CEL expressions that several models share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pydantic.config import JsonDict

RULES: Final = "x-kubernetes-validations"

FREE_FORM: Final[JsonDict] = {"x-kubernetes-preserve-unknown-fields": True}
"""For a field with an external schema: its content is passed on unchanged."""

AS_SET: Final[JsonDict] = {"x-kubernetes-list-type": "set"}
"""For an unordered list of distinct values: several field managers may each own some of them."""


def keyed_by(field: str) -> JsonDict:
    """Return the schema extension for a list of objects identified by one of their fields."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


class RuleReason(StrEnum):
    """Reason that the API server puts before the message: ``Invalid value``, ``Forbidden``, ``Required value``."""

    INVALID = "FieldValueInvalid"
    FORBIDDEN = "FieldValueForbidden"
    REQUIRED = "FieldValueRequired"


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition that must hold, and the message for a violation."""

    expression: str
    """CEL, true if valid. ``self`` is the value that the rule is attached to, ``oldSelf`` the one before an update."""
    message: str
    field: str = ""
    """The offending field, relative to the one that the rule is attached to: ``delivery.deadLetter``."""
    reason: RuleReason = RuleReason.INVALID
    message_expression: str = ""
    """CEL for a message that depends on the value. If its evaluation fails, ``message`` is used."""

    def as_schema(self) -> dict[str, Any]:
        """Return the rule as an entry of ``x-kubernetes-validations``."""
        written = {"rule": self.expression, "message": self.message}
        if self.message_expression:
            written["messageExpression"] = self.message_expression
        if self.reason is not RuleReason.INVALID:
            written["reason"] = self.reason.value
        if self.field:
            written["fieldPath"] = f".{self.field}"
        return written


def text(value: str) -> str:
    """Return a CEL string literal; raw where quotes allow it, so that regular expressions stay readable."""
    if "'" not in value:
        return f"r'{value}'" if "\\" in value else f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def listed(values: Iterable[str]) -> str:
    """Return a CEL list of the strings, sorted so that the output is deterministic."""
    return f"[{', '.join(map(text, sorted(values)))}]"


def unless_given(field: str, condition: str) -> str:
    """Return a CEL expression that applies the condition only if the field is present."""
    return f"!has(self.{field}) || {condition}"


def unchangeable(field: str, why: str) -> Rule:
    """Return a rule for an immutable field. It must have a default or be required: absence is not compared."""
    return Rule(
        f"self.{field} == oldSelf.{field}", f"can't be changed: {why}", field=field, reason=RuleReason.FORBIDDEN
    )
