"""Translation of pydantic's errors into actionable messages: location, problem, remedy.

No message repeats a value, unless the value can't be a secret (the name of a choice, a number out of bounds). Hints
("did you mean ...", "it belongs in ...") come from a lookup of fields and types in the models by YAML path.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mailboat_spec.base import Model, one_line, yaml_name
from mailboat_spec.rules import Refused

Step = str | int


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
        shown = [str(problem) for problem in problems]
        super().__init__(shown[0] if len(shown) == 1 else "\n  ".join((f"{len(shown)} problems:", *shown)))
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
_NAMES_OF_TYPES: Final = (
    (NoneType, "empty"),
    (bool, "a boolean (YAML reads a bare yes, no, on or off as one)"),  # before int, its base
    (int | float, "a number"),
    (str, "a string"),
    (Mapping, "a mapping"),
    (list | tuple, "a list"),
    (date, "a date"),
)
_MESSAGES: Final = {
    "finite_number": "must be a finite number",
    "too_long": "takes at most {max_length} items",
    "string_too_long": "is too long: at most {max_length} characters",
    "invalid_key": "field names must be strings: put this one in quotes",
}
_LONGEST_CHOICE: Final = 60
_DEAD_LETTER_TOPIC: Final = {"deadlettertopic", "deadletterqueue", "dlq", "dlqtopic"}
"""Names by which other systems call ``spec.delivery.deadLetter.topic``, without separators."""


def problems_of(source: str, model: type[Model], error: ValidationError) -> Iterator[Problem]:
    """Yield all problems that pydantic found in one document, in the order of the document's fields."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":  # caused by another error, which is reported
            continue
        if detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]:
            continue  # only an effect of invalid items, which pydantic does not count but reports
        path = tuple(step for step in detail["loc"] if step != "[key]")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Refused):
            for refusal in cause.refusals:
                yield Problem(source, spelled((*path, *refusal.path)), refusal.message)
        else:
            yield Problem(source, spelled(path), _message(model, path, detail))


def choice_message(given: object, allowed: tuple[str, ...]) -> str:
    """Return the message for a value outside an enumeration: the allowed values and the most similar one."""
    choices = f"must be one of {', '.join(allowed)}" if len(allowed) > 1 else f"must be {allowed[0]}"
    if not isinstance(given, str):
        return f"{choices}, not {_kind_of(given)}"
    meant = nearest(given, allowed) if len(allowed) > 1 else None
    shown = given if len(given) <= _LONGEST_CHOICE else f"{given[:_LONGEST_CHOICE]}..."
    return f'{choices}, not "{shown}"' + (f"; did you mean {meant}?" if meant else "")


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
        case "enum" | "literal_error":
            expected = type_at(model, path)  # an enumeration or a Literal
            return choice_message(given, get_args(expected) or tuple(expected))
        case "greater_than_equal":
            return f"must be at least {_number(context['ge'])}, not {_number(given)}"
        case "less_than_equal":
            return f"must be at most {_number(context['le'])}, not {_number(given)}"
        case "too_short":
            return f"needs at least {context['min_length']} item{'s' if context['min_length'] > 1 else ''}"
        case kind if kind in _MESSAGES:
            return _MESSAGES[kind].format(**context)
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
    has_topic = field_at(model, ("spec", "delivery", "deadLetter", "topic")) is not None
    if has_topic and _plain(str(name)) in _DEAD_LETTER_TOPIC:
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
    named = (name for type_, name in _NAMES_OF_TYPES if isinstance(value, type_))
    return next(named, f"a {type(value).__name__}")


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def yaml_fields(model: type[Model]) -> dict[str, FieldInfo]:
    """Return the fields of a model by YAML name."""
    return {yaml_name(attribute): field for attribute, field in model.model_fields.items()}


def type_at(root: type[Model], path: Sequence[Step]) -> Any:
    """Return the type expected at a path, or None if the path leaves the models."""
    here: Any = root
    for step in path:
        here = _bare(here)
        if _is_model(here):
            field = yaml_fields(here).get(str(step))
            here = field.annotation if field else None
        elif get_args(here):  # tuple[X, ...] or Mapping[str, X]
            here = get_args(here)[0] if isinstance(step, int) else get_args(here)[-1]
        else:
            return None
    return _bare(here)


def field_at(root: type[Model], path: Sequence[Step]) -> FieldInfo | None:
    parent = model_at(root, path[:-1]) if path else None
    return yaml_fields(parent).get(str(path[-1])) if parent is not None else None


def model_at(root: type[Model], path: Sequence[Step]) -> type[Model] | None:
    """Return the model at a path, or None if the type there is no model."""
    found = type_at(root, path)
    return found if _is_model(found) else None


def paths_to(root: type[Model], name: str) -> Iterator[tuple[str, ...]]:
    """Yield all paths below a model whose last step equals ``name`` up to case and separators. Lists are skipped."""
    for alias, field in yaml_fields(root).items():
        if _plain(alias) == _plain(name):
            yield (alias,)
        if _is_model(below := _bare(field.annotation)):
            for path in paths_to(below, name):
                yield (alias, *path)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to ``name``, ignoring case and separators; None if none is close."""
    by_plain = {_plain(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.7)
    return by_plain[close[0]] if close else None


def spelled(path: Sequence[Step]) -> str:
    """Return a path for messages: ``spec.filter.eventTypes[1]``, ``spec.sink.kafka.config["linger.ms"]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier():
            text += f".{step}" if text else step
        else:
            text += f'["{step}"]'
    return text


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, Model)


def _bare(annotation: Any) -> Any:
    """Return the type without ``Annotated`` and ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif NoneType in get_args(annotation):
            annotation = next(argument for argument in get_args(annotation) if argument is not NoneType)
        else:
            return annotation
