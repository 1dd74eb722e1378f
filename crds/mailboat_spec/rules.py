"""Rules of the models: Python checks for ``mailboat run`` and the operator, and the same in CEL for the API server.

A ``Constraint`` between the fields of one model has a field, a message and a ``Predicate`` in both languages. Checks
that a constraint can't express override ``wrong_combinations`` (Python) and ``admission_rules`` (CEL), with the same
messages. Types with a stricter format than a string (durations, names of topics) define their own rules.

Fields are named by their path in YAML. The API server fills in defaults before it evaluates rules, so a field with a
default can only be refused for another value. It limits the estimated cost of a rule before it accepts a CRD: strings,
lists and mappings of the models therefore have maximum lengths.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_snake
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

RULES: Final = "x-kubernetes-validations"

FREE_FORM: Final[JsonDict] = {"x-kubernetes-preserve-unknown-fields": True}
"""For a field with an external schema: its content is passed on unchanged."""

AS_SET: Final[JsonDict] = {"x-kubernetes-list-type": "set"}
"""For an unordered list of distinct values: several field managers may each own some of them."""


def keyed_by(field: str) -> JsonDict:
    """Return the schema extension for a list of objects identified by one of their fields."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


RuleReason = Literal["FieldValueForbidden", "FieldValueRequired"]
"""What the API server puts before a message: ``Forbidden`` or ``Required value``, not ``Invalid value``."""

Rule = dict[str, Any]
"""An entry of ``x-kubernetes-validations``."""


def rule(
    expression: str, message: str, field: str = "", reason: RuleReason | None = None, message_expression: str = ""
) -> Rule:
    """Return one condition that must hold, and the message for a violation.

    ``expression`` is CEL, true if valid: ``self`` is the value that the rule is attached to, ``oldSelf`` the one before
    an update. ``field`` is the offending one, relative to that value. ``message_expression`` is CEL for a message that
    depends on the value. If its evaluation fails, ``message`` is used.
    """
    optional = {"messageExpression": message_expression, "reason": reason, "fieldPath": field and f".{field}"}
    return {"rule": expression, "message": message} | {name: value for name, value in optional.items() if value}


def int_or_string(condition: str, message: str, **limits: int | str) -> JsonSchemaValue:
    """Return the schema of a value that YAML writes as a number or as a string. The condition is on the string."""
    return {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        RULES: [rule(f"type(self) == int || {condition}", message)],
        **limits,
    }


class ValueCheck:
    """Base of annotations that check the value of one field, in Python and in the CRD."""

    def check(self, value: Any) -> Any:
        """Return the value, or raise ``ValueError``."""
        raise NotImplementedError

    def rules(self) -> Iterator[Rule]:
        """Yield the same check as CEL rules."""
        raise NotImplementedError

    def limits(self) -> JsonSchemaValue:
        """Return further entries of the schema."""
        return {}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), **self.limits(), RULES: list(self.rules())}


def text(value: str) -> str:
    """Return a CEL string literal; raw where quotes allow it, so that regular expressions stay readable."""
    if "'" not in value:
        return f"r'{value}'" if "\\" in value else f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def listed(values: Iterable[str]) -> str:
    """Return a CEL list of the strings, sorted so that the output is deterministic."""
    return f"[{', '.join(map(text, sorted(values)))}]"


_VALUE: Final = re.compile(r"\{([A-Za-z.]+)\}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One wrong combination of fields: YAML path relative to the refusing model, and a message with the remedy."""

    path: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.message}" if self.path else self.message


class Refused(ValueError):
    """Raised inside pydantic's validation with all refusals of one model, so that all are reported at once."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = refusals


@dataclass(frozen=True, slots=True)
class Predicate:
    """A condition on a model, in CEL and in Python."""

    cel: str
    evaluate: Callable[[Any], bool] = lambda model: True
    """Left out where only the API server can evaluate it, or where a field's type checks it in Python."""

    def __or__(self, other: Predicate) -> Predicate:
        return Predicate(f"{self.cel} || {other.cel}", lambda model: self.evaluate(model) or other.evaluate(model))

    def __and__(self, other: Predicate) -> Predicate:
        return Predicate(f"({self.cel}) && ({other.cel})", lambda model: self.evaluate(model) and other.evaluate(model))


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition that must hold, and the message for a violation."""

    field: str
    """The offending field, relative to the model; empty for the model itself."""
    message: str
    valid: Predicate
    reason: RuleReason | None = None
    detailed: str = ""
    """The message with values of fields in braces, shown instead of ``message``."""

    def refusal(self, model: Any) -> Refusal:
        """Return the refusal of a model for which the condition does not hold."""
        shown = _VALUE.sub(lambda found: str(read(model, found[1])), self.detailed)
        return Refusal(tuple(self.field.split(".")) if self.field else (), shown or self.message)

    def rule(self) -> Rule:
        parts = [f"self.{part}" if index % 2 else text(part) for index, part in enumerate(_VALUE.split(self.detailed))]
        expression = " + ".join(parts) if self.detailed else ""
        return rule(self.valid.cel, self.message, self.field, self.reason, expression)


def read(model: Any, path: str) -> Any:
    """Return the value at the path; None if the field, or one on the way to it, is absent."""
    for name in path.split("."):
        model = None if model is None else getattr(model, f"{name}_" if keyword.iskeyword(name) else to_snake(name))
    return model


def given(path: str) -> Predicate:
    """The field is present."""
    cel = " && ".join(f"has(self.{each})" for each in _prefixes(path))
    return Predicate(cel, lambda model: read(model, path) is not None)


def absent(path: str) -> Predicate:
    """The field is not present."""
    cel = " || ".join(f"!has(self.{each})" for each in _prefixes(path))
    return Predicate(cel, lambda model: read(model, path) is None)


def empty(path: str) -> Predicate:
    """The list or mapping is absent or has no entry."""
    return absent(path) | Predicate(f"self.{path}.size() == 0", lambda model: not read(model, path))


def equals(path: str, value: str | int) -> Predicate:
    """The field, which is present, has this value."""
    return Predicate(f"self.{path} == {_literal(value)}", lambda model: bool(read(model, path) == value))


def differs(path: str, value: str | int) -> Predicate:
    """The field, which is present, has another value."""
    return Predicate(f"self.{path} != {_literal(value)}", lambda model: bool(read(model, path) != value))


def unlike(path: str, other: str) -> Predicate:
    """The two fields, which are present, have different values."""
    return Predicate(f"self.{path} != self.{other}", lambda model: bool(read(model, path) != read(model, other)))


def exactly_one(first: str, second: str, *, none: str, both: str) -> tuple[Constraint, ...]:
    """Return the constraints of two fields that exclude each other, and of which one is required."""
    return (
        Constraint("", none, given(first) | given(second), "FieldValueRequired"),
        Constraint("", both, absent(first) | absent(second)),
    )


def unchangeable(field: str, why: str, *, optional: bool = False) -> Constraint:
    """Return the constraint of an immutable field. Set ``optional`` if the field may be absent."""
    same = f"self.{field} == oldSelf.{field}"
    if optional:
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return Constraint(field, f"can't be changed: {why}", Predicate(same), "FieldValueForbidden")


def _prefixes(path: str) -> list[str]:
    """Return ``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``: CEL can't read a field of an absent one."""
    parts = path.split(".")
    return [".".join(parts[: index + 1]) for index in range(len(parts))]


def _literal(value: str | int) -> str:
    return text(value) if isinstance(value, str) else str(value).lower()
