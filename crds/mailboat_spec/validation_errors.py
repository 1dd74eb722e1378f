"""Translation of pydantic's errors into actionable messages: location, problem, remedy.

No message repeats a value, unless the value can't be a secret (the name of a choice, a number out of bounds).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mailboat_spec.base import Model, one_line
from mailboat_spec.field_paths import Step, field_at, model_at, nearest, paths_to, spelled, type_at, yaml_fields
from mailboat_spec.rules import Refused


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in one document."""

    source: str
    """The document: ``orders.yaml, document 2``."""
    path: str
    """YAML path of the field; empty for the document as a whole."""
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.message) if part)


class SpecError(ValueError):
    """Invalid manifests, with all problems found in them."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        if len(problems) == 1:
            text = str(problems[0])
        else:
            text = "\n".join((f"{len(problems)} problems:", *(f"  {problem}" for problem in problems)))
        super().__init__(text)
        self.problems = problems


_EXPECTED: Final = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_DEAD_LETTER_TOPIC: Final = {"deadlettertopic", "deadletterqueue", "dlq", "dlqtopic"}
"""Names by which other systems call ``spec.delivery.deadLetter.topic``, without separators."""
_SILENT: Final = {"default_factory_not_called"}  # caused by another error, which is reported


def problems_of(source: str, model: type[Model], error: ValidationError) -> Iterator[Problem]:
    """Yield all problems that pydantic found in one document, in the order of the document's fields."""
    for detail in error.errors(include_url=False):
        if detail["type"] in _SILENT or _counts_only_the_valid(detail):
            continue
        path = tuple(step for step in detail["loc"] if step != "[key]")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Refused):
            for refusal in cause.refusals:
                yield Problem(source, spelled((*path, *refusal.path)), refusal.message)
        else:
            yield Problem(source, spelled(path), _message(model, path, detail))


def _counts_only_the_valid(detail: ErrorDetails) -> bool:
    """Return whether ``too_short`` is only an effect of invalid items, which pydantic does not count but reports."""
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def choice_message(given: object, allowed: tuple[str, ...]) -> str:
    """Return the message for a value outside an enumeration: the allowed values and the most similar one."""
    choices = f"must be one of {', '.join(allowed)}" if len(allowed) > 1 else f"must be {allowed[0]}"
    if not isinstance(given, str):
        return f"{choices}, not {_kind_of(given)}"
    meant = nearest(given, allowed) if len(allowed) > 1 else None
    return f'{choices}, not "{_shortened(given)}"' + (f"; did you mean {meant}?" if meant else "")


def _message(model: type[Model], path: tuple[Step, ...], detail: ErrorDetails) -> str:
    context, given = detail.get("ctx", {}), detail["input"]
    match detail["type"]:
        case "value_error":
            return str(context["error"])
        case "extra_forbidden":
            return _unknown_field(model, path)
        case "missing":
            field = field_at(model, path)
            first = one_line(field.description).partition(". ")[0].rstrip(".") if field and field.description else ""
            return f"is required: {first}." if first else "is required"
        case "enum":
            return choice_message(given, _values(type_at(model, path)))
        case "greater_than_equal":
            return f"must be at least {_number(context['ge'])}, not {_number(given)}"
        case "less_than_equal":
            return f"must be at most {_number(context['le'])}, not {_number(given)}"
        case "finite_number":
            return "must be a finite number"
        case "too_short":
            return f"needs at least {context['min_length']} item{'s' if context['min_length'] > 1 else ''}"
        case "too_long":
            return f"takes at most {context['max_length']} items"
        case "string_too_long":
            return f"is too long: at most {context['max_length']} characters"
        case "invalid_key":
            return "field names must be strings: put this one in quotes"
        case kind if kind in _EXPECTED:
            return _wrong_type(_EXPECTED[kind], given) + _form(model_at(model, path))
        case _:
            return detail["msg"]


def _unknown_field(model: type[Model], path: tuple[Step, ...]) -> str:
    *parent, name = path
    parent_model = model_at(model, parent)
    if parent_model is None:
        return "unknown field"
    fields = yaml_fields(parent_model)
    plain = str(name).replace("_", "").replace("-", "").lower()
    if plain in _DEAD_LETTER_TOPIC and field_at(model, ("spec", "delivery", "deadLetter", "topic")) is not None:
        return "unknown field: the topic for dead letters is spec.delivery.deadLetter.topic"
    if meant := nearest(str(name), fields):
        return f"unknown field, did you mean {meant}?"
    elsewhere = [found for found in paths_to(model, str(name)) if found[0] == "spec"]
    if len(elsewhere) == 1 and path[: len(elsewhere[0])] == elsewhere[0]:
        return f"stands inside {spelled(elsewhere[0])} itself: move what is in it up by one level"
    if len(elsewhere) == 1:
        return f"unknown field here, it belongs in {spelled(elsewhere[0])}"
    return f"unknown field, known here: {', '.join(fields)}"


def _form(expected: type[Model] | None) -> str:
    """Return a remedy with the required fields of a mapping in YAML, or with its first field if none is required."""
    if expected is None or not (fields := yaml_fields(expected)):
        return ""
    shown = [name for name, field in fields.items() if field.is_required()] or [next(iter(fields))]
    return f": write {{{', '.join(f'{name}: ...' for name in shown)}}}"


def _wrong_type(expected: str, given: object) -> str:
    message = f"must be {expected}, not {_kind_of(given)}"
    if expected == "a string" and isinstance(given, bool | int | float | date):
        return f"{message}: put it in quotes"
    if expected != "a string" and isinstance(given, str) and expected not in ("a list", "a mapping"):
        return f"{message}: write it without quotes"
    if expected == "a list" and isinstance(given, str):
        return f"{message}: put it in brackets, [...]"
    return message


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "empty"
        case bool():
            return "a boolean (YAML reads a bare yes, no, on or off as one)"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case date():
            return "a date"
        case _:
            return f"a {type(value).__name__}"


def _values(expected: Any) -> tuple[str, ...]:
    if isinstance(expected, type) and issubclass(expected, StrEnum):
        return tuple(member.value for member in expected)
    return ()


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
