"""What the API server refuses by itself: rules in CEL, written beside the checks that the models make in Python.

A model says twice what it does not take: in ``wrong_combinations``, which speaks on a laptop and in the operator, and
in ``admission_rules``, which ends up in the CRD and speaks in ``kubectl apply``, with the same words. Types that are
more than a string (durations, names of topics) bring their rules along.

The API server bounds what a rule may cost before it takes a CRD, hence the limits on the lengths of strings, lists
and mappings all over the models. This module owns the form of rules and the few phrases of CEL that several models
need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pydantic.config import JsonDict

RULES: Final = "x-kubernetes-validations"

FREE_FORM: Final[JsonDict] = {"x-kubernetes-preserve-unknown-fields": True}
"""For a field whose content is somebody else's: passed on as it is, whatever it holds."""

AS_SET: Final[JsonDict] = {"x-kubernetes-list-type": "set"}
"""For a list of different values in no order: two appliers may each own some of them."""


def keyed_by(field: str) -> JsonDict:
    """For a list of objects that are told apart by one of their fields."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


class Because(StrEnum):
    """How the API server introduces a refusal: ``Invalid value``, ``Forbidden``, ``Required value``."""

    INVALID = "FieldValueInvalid"
    FORBIDDEN = "FieldValueForbidden"
    REQUIRED = "FieldValueRequired"


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition that must hold, and what to say where it does not."""

    expression: str
    """In CEL, true if all is well. ``self`` is what the rule stands at, ``oldSelf`` what it was before an update."""
    message: str
    field: str = ""
    """The field that is to blame, below the one that the rule stands at: ``delivery.deadLetter``."""
    because: Because = Because.INVALID
    message_expression: str = ""
    """In CEL, where the message depends on what was given; ``message`` is for when this can't be evaluated."""

    def as_schema(self) -> dict[str, Any]:
        """The rule as a CRD writes it."""
        written = {"rule": self.expression, "message": self.message}
        if self.message_expression:
            written["messageExpression"] = self.message_expression
        if self.because is not Because.INVALID:
            written["reason"] = self.because.value
        if self.field:
            written["fieldPath"] = f".{self.field}"
        return written


def text(value: str) -> str:
    """A string as CEL writes it: raw, so that regular expressions stay readable, where quotes allow it."""
    if "'" not in value:
        return f"r'{value}'" if "\\" in value else f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def listed(values: Iterable[str]) -> str:
    """Strings as a list in CEL, sorted, so that the same set is always written in the same way."""
    return f"[{', '.join(map(text, sorted(values)))}]"


def unless_given(field: str, condition: str) -> str:
    """The condition, for a field that may be absent."""
    return f"!has(self.{field}) || {condition}"


def unchangeable(field: str, why: str) -> Rule:
    """A field that has its value for life. The field must have a default or be required: absence is not compared."""
    return Rule(f"self.{field} == oldSelf.{field}", f"can't be changed: {why}", field=field, because=Because.FORBIDDEN)
