"""Translation of pydantic's JSON Schema into a structural schema, the OpenAPI dialect of CRDs.

A structural schema has no references, no alternatives for null, and no ``additionalProperties`` beside ``properties``.
The API server removes null values and refuses unknown fields by itself. Three decisions are made here:

- A string with a CEL rule loses its ``pattern`` and ``format``. Otherwise the API server would report both, and the
  regular expression would hide the rule's message.
- Defaults of fields are written, so that ``kubectl get -o yaml`` shows the effective values. An absent mapping gets
  the defaults of its fields. A mapping whose absence has a meaning (``deadLetter``) gets no default.
- A status has neither defaults nor rules: the API server must never refuse a status update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from mailboat_spec.base import Model
from mailboat_spec.rules import RULES
from mailboat_spec.scalars import Duration

Schema = dict[str, Any]

_FIRST: Final = ("description", "type", "format", "enum", "default", "required")
_RULE: Final = ("rule", "message")
_REPLACED_BY_RULES: Final = ("pattern", "format")
_NOT_IN_STATUS: Final = ("default", "pattern", "maxLength", "minimum", "maximum")
_LARGEST_INT32: Final = 2**31 - 1
_LARGEST_INT64: Final = 2**63 - 1


class WithDefaults(GenerateJsonSchema):
    """pydantic's generator with durations written as in the documentation."""

    def encode_default(self, dft: Any) -> Any:
        return _as_written(dft) if isinstance(dft, Duration) else super().encode_default(dft)


def structural_schema(model: type[Model], *, report: bool) -> Schema:
    """Return the structural schema of a model. ``report`` is true for a status."""
    document = model.model_json_schema(by_alias=True, schema_generator=WithDefaults)
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
        if RULES in result and not self._report:
            result[RULES] = [_in_order(rule, _RULE) for rule in result[RULES]]
            for name in _REPLACED_BY_RULES:
                result.pop(name, None)
        _settle_numbers(result)
        if "x-kubernetes-preserve-unknown-fields" in result:
            result.pop(RULES, None)  # CEL rules can't access fields without a schema
        if self._report:
            for name in (RULES, *_NOT_IN_STATUS):
                result.pop(name, None)
        return _in_order(result, _FIRST)

    def _property(self, written: Schema, *, required: bool) -> Schema:
        result = self.of(written)
        if result.get("default", True) in (None, "", [], {}):
            del result["default"]  # null, an empty list, string or mapping: equivalent to absent
        nullable = any(choice.get("type") == "null" for choice in written.get("anyOf", ()))
        if not (required or nullable) and (inside := _defaults_inside(result)):
            result["default"] = inside
        return _in_order(result, _FIRST)

    def _without_references(self, written: Schema) -> Schema:
        """Return the schema with its reference merged in. Its own entries (descriptions) take precedence."""
        if reference := written.get("$ref"):
            return {**self._without_references(self._shared[reference.rpartition("/")[2]]), **written}
        if "anyOf" in written and "x-kubernetes-int-or-string" not in written:
            own = {name: value for name, value in written.items() if name != "anyOf"}
            (given,) = (choice for choice in written["anyOf"] if choice.get("type") != "null")
            return {**self._without_references(given), **own}
        return written


_KEPT: Final = frozenset(
    {
        "type", "description", "default", "enum", "required", "format", "pattern", "anyOf",
        "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    }
)  # fmt: skip


def _settle_numbers(result: Schema) -> None:
    """Set the integer format and drop a limit that the format implies: 2^63 - 1 has no exact form in JSON."""
    if result.get("type") == "integer":
        small = result.get("maximum", _LARGEST_INT64) <= _LARGEST_INT32
        result["format"] = "int32" if small else "int64"
        if result.get("maximum", 0) >= _LARGEST_INT64:
            del result["maximum"]
    default = result.get("default")
    if isinstance(default, float) and default.is_integer():
        result["default"] = int(default)


def _defaults_inside(schema: Schema) -> Schema:
    """Return all nested defaults: rules run on a mapping's default before the defaults inside it are applied."""
    fields = schema.get("properties", {})
    return {name: field["default"] for name, field in fields.items() if "default" in field}


def _in_order(fields: Schema, first: tuple[str, ...]) -> Schema:
    """Order the fields for readers: ``first``, then the others sorted by name."""
    others = sorted(name for name in fields if name not in first)
    return {name: fields[name] for name in (*first, *others) if name in fields}


def _as_written(duration: Duration) -> str:
    """Return ``60s`` instead of ``1m``, as descriptions and documentation do."""
    return "60s" if duration == Duration.parse("60s") else str(duration)
