"""From pydantic's JSON Schema to a structural schema: the dialect of OpenAPI that a CRD is written in.

That dialect has no references, no alternatives for null, and no ``additionalProperties`` beside ``properties``; the API
server removes null and refuses unknown fields by itself. Three decisions are taken here:

- A string with a rule in CEL loses its ``pattern`` and ``format``. Both would speak, and one good sentence is better
  than the same sentence behind a regular expression.
- Defaults of fields are written, so that ``kubectl get -o yaml`` shows what holds. A mapping that was left out gets
  the defaults of what is inside; one that means something by being absent (``deadLetter``) gets none.
- A status has neither defaults nor rules: it is a report, and a report must never be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from mailboat_spec.admission import RULES
from mailboat_spec.base import Model
from mailboat_spec.durations import Duration

Schema = dict[str, Any]

_FIRST: Final = ("description", "type", "format", "enum", "default", "required")
_RULE: Final = ("rule", "message")
_SAID_BY_RULES: Final = ("pattern", "format")
_OF_NO_REPORT: Final = ("default", "pattern", "maxLength", "minimum", "maximum")
_LARGEST_INT32: Final = 2**31 - 1
_LARGEST_INT64: Final = 2**63 - 1


class _WithDefaults(GenerateJsonSchema):
    """pydantic's own generator, but a duration is written as a person would write it."""

    def encode_default(self, dft: Any) -> Any:
        return _as_written(dft) if isinstance(dft, Duration) else super().encode_default(dft)


def structural_schema(model: type[Model], *, report: bool) -> Schema:
    """The schema of a model; ``report`` for a status."""
    document = model.model_json_schema(by_alias=True, schema_generator=_WithDefaults)
    return _Translation(document.get("$defs", {}), report=report).of(document)


class _Translation:
    def __init__(self, shared: Mapping[str, Schema], *, report: bool) -> None:
        self._shared = shared
        self._report = report

    def of(self, written: Schema) -> Schema:
        written = self._without_references(written)
        result = {name: value for name, value in written.items() if name in _KEPT or name.startswith("x-kubernetes-")}
        if "properties" in written:
            required = written.get("required", ())
            result["properties"] = {
                name: self._property(field, required=name in required) for name, field in written["properties"].items()
            }
        elif "x-kubernetes-preserve-unknown-fields" not in written and (values := written.get("additionalProperties")):
            result["additionalProperties"] = self.of(values)
        if "items" in written:
            result["items"] = self.of(written["items"])
        if RULES in result:
            result[RULES] = [_in_order(rule, _RULE) for rule in result[RULES]]
        self._settle_strings(result)
        _settle_numbers(result)
        if "x-kubernetes-preserve-unknown-fields" in result:
            result.pop(RULES, None)  # a rule can't look into what has no schema
        if self._report:
            for name in (RULES, *_OF_NO_REPORT):
                result.pop(name, None)
        return _in_order(result, _FIRST)

    def _property(self, written: Schema, *, required: bool) -> Schema:
        result = self.of(written)
        if result.get("default", True) in (None, "", [], {}):
            del result["default"]  # nothing, an empty list, an empty text: as good as absent
        means_something_absent = any(choice.get("type") == "null" for choice in written.get("anyOf", ()))
        if not (required or means_something_absent) and (inside := _defaults_inside(result)):
            result["default"] = inside
        return _in_order(result, _FIRST)

    def _without_references(self, written: Schema) -> Schema:
        """The schema itself with what it refers to merged in; its own words (descriptions) come before the others'."""
        if reference := written.get("$ref"):
            return {**self._without_references(self._shared[reference.rpartition("/")[2]]), **written}
        if "anyOf" in written and "x-kubernetes-int-or-string" not in written:
            own = {name: value for name, value in written.items() if name != "anyOf"}
            (given,) = (choice for choice in written["anyOf"] if choice.get("type") != "null")
            return {**self._without_references(given), **own}
        return written

    def _settle_strings(self, result: Schema) -> None:
        if RULES in result and not self._report:
            for name in _SAID_BY_RULES:
                result.pop(name, None)
        if "const" in result:
            result["enum"] = [result.pop("const")]


_KEPT: Final = frozenset(
    {
        "type", "description", "default", "enum", "const", "required", "format", "pattern", "anyOf",
        "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    }
)  # fmt: skip


def _settle_numbers(result: Schema) -> None:
    """A limit that the format says already is left out: the largest of all numbers has no exact form in JSON."""
    if result.get("type") == "integer":
        small = result.get("maximum", _LARGEST_INT64) <= _LARGEST_INT32
        result["format"] = "int32" if small else "int64"
        if result.get("maximum", 0) >= _LARGEST_INT64:
            del result["maximum"]
    default = result.get("default")
    if isinstance(default, float) and default.is_integer():
        result["default"] = int(default)


def _defaults_inside(schema: Schema) -> Schema:
    """In full: rules are tried on the default of a mapping before the defaults inside it are filled in."""
    fields = schema.get("properties", {})
    return {name: field["default"] for name, field in fields.items() if "default" in field}


def _in_order(fields: Schema, first: tuple[str, ...]) -> Schema:
    """What a reader looks for first comes first."""
    others = sorted(name for name in fields if name not in first)
    return {name: fields[name] for name in (*first, *others) if name in fields}


def _as_written(duration: Duration) -> str:
    """``60s`` and not ``1m``: as the descriptions and the documentation have it."""
    return "60s" if duration == Duration.parse("60s") else str(duration)
