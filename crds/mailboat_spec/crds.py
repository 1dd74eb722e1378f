"""The two CustomResourceDefinitions as plain mappings, and the JSON Schema of a manifest for editors.

Both are generated from the models, which also contain the CEL rules. ``crds/generate.py`` writes the YAML.

A structural schema, the OpenAPI dialect of CRDs, has no references, no alternatives for null, and no
``additionalProperties`` beside ``properties``. The API server removes null values and refuses unknown fields by itself.
Three decisions are made in the translation of pydantic's JSON Schema:

- A string with a CEL rule loses its ``pattern`` and ``format``. Otherwise the API server would report both, and the
  regular expression would hide the rule's message.
- Defaults of fields are written, so that ``kubectl get -o yaml`` shows the effective values. An absent mapping gets
  the defaults of its fields. A mapping whose absence has a meaning (``deadLetter``) gets no default.
- A status has neither defaults nor rules: the API server must never refuse a status update.

A printer column of ``kubectl get`` is one path into the object. Values that need arithmetic (``1/2``, ``100000+``) are
therefore status fields that the operator writes for this purpose. The columns stand in reading order: health,
destination, lag, reason of a failure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from mailboat_spec import names
from mailboat_spec.resources.relay import OutboxRelay
from mailboat_spec.resources.resource import Resource
from mailboat_spec.resources.status import ConditionType
from mailboat_spec.resources.subscription import EventSubscription
from mailboat_spec.rules import RULES
from mailboat_spec.scalars import Duration

Schema = dict[str, Any]

_WIDE: Final = {"priority": 1}
"""Extension of a column that only ``kubectl get -o wide`` prints."""


def _column(name: str, path: str, description: str, type: str = "string") -> Schema:
    """Return an entry of ``additionalPrinterColumns``. kubectl prints the name in capitals."""
    return {"name": name, "type": type, "jsonPath": path, "description": description}


_CONDITION: Final = f'.status.conditions[?(@.type=="{ConditionType.READY}")]'
_READY: Final = _column("Ready", f"{_CONDITION}.status", "Whether all that the spec asks for is there.")
_STATUS: Final = _column("Status", f"{_CONDITION}.reason", "Why it is ready or not, in one word.")
_AGE: Final = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}

_RELAY_COLUMNS: Final = (
    _READY,
    _column("Runtime", ".spec.runtime", "Where relays run."),
    _column("Replicas", ".status.replicasDisplay", "Relays that are ready out of those that are wanted."),
    _column("Subscriptions", ".status.subscriptions", "Subscriptions that refer to it.", "integer"),
    _STATUS,
    _AGE,
    _column("Table", ".spec.outbox.table", "The outbox.") | _WIDE,
)
_SUBSCRIPTION_COLUMNS: Final = (
    _READY,
    _column("Source", ".status.source", "Kind and name of what is read."),
    _column("Sink", ".status.sink", "The kind of destination."),
    _column("Partitions", ".status.partitionCount", "Slices that are moved independently.", "integer"),
    _column("Lag", ".status.lagDisplay", "Matching events not yet settled."),
    _column("Oldest", ".status.oldestAge", "Age of the oldest of them."),
    _column("Dead", ".status.dead", "Dead letters not yet replayed.", "integer"),
    _STATUS,
    _AGE,
    _column("Parked", ".status.parked", "Events waiting for their next attempt.", "integer") | _WIDE,
    _column("Rate", ".status.rate", "Events published per second.", "number") | _WIDE,
    _column("Error Age", ".status.lastErrorTime", "Time since the last failure.", "date") | _WIDE,
    _column("Last Error", ".status.lastError", "The last failure.") | _WIDE,
)
_SCALE: Final = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


@dataclass(frozen=True, slots=True)
class Definition:
    """One kind of resource with everything its CRD contains."""

    kind: str
    plural: str
    short_name: str
    model: type[Resource]
    columns: tuple[Schema, ...]
    subresources: Schema

    def schema(self) -> Schema:
        """Return the structural schema of the whole object, spec and status.

        The API server validates ``metadata`` itself; a CRD schema may only restrict names in it.
        """
        document = self.model.model_json_schema(by_alias=True, schema_generator=WithDefaults)
        whole = _Translation(document["$defs"], report=False).of(document)
        fields = whole["properties"]
        for always_given in ("apiVersion", "kind"):
            description = fields[always_given]["description"].partition(" Default:")[0]
            fields[always_given] = {"description": description, "type": "string"}
        fields["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
        fields["status"] = _Translation(document["$defs"], report=True).of(document["properties"]["status"])
        return {**whole, "required": ["spec"]}

    def manifest(self) -> dict[str, Any]:
        """Return the CRD manifest for ``kubectl apply``."""
        version = {
            "name": names.VERSION,
            "served": True,
            "storage": True,
            "subresources": {"status": {}, **self.subresources},
            "additionalPrinterColumns": list(self.columns),
            "schema": {"openAPIV3Schema": self.schema()},
        }
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"{self.plural}.{names.GROUP}",
                "labels": {"app.kubernetes.io/name": "mailboat", "app.kubernetes.io/component": "crds"},
            },
            "spec": {
                "group": names.GROUP,
                "scope": "Namespaced",
                "names": {
                    "kind": self.kind,
                    "listKind": f"{self.kind}List",
                    "plural": self.plural,
                    "singular": self.kind.lower(),
                    "shortNames": [self.short_name],
                    "categories": ["mailboat"],  # `kubectl get mailboat` lists both kinds
                },
                "versions": [version],
            },
        }


def definitions() -> tuple[Definition, ...]:
    return (
        Definition(names.RELAY_KIND, names.RELAY_PLURAL, "obr", OutboxRelay, _RELAY_COLUMNS, {"scale": _SCALE}),
        Definition(
            names.SUBSCRIPTION_KIND, names.SUBSCRIPTION_PLURAL, "evs", EventSubscription, _SUBSCRIPTION_COLUMNS, {}
        ),
    )


def json_schema() -> Schema:
    """Return the JSON Schema of one manifest for editors: completion, descriptions and checks while typing.

    Unlike the structural schemas of the CRDs it keeps references and refuses unknown fields, which an API server does
    by itself. CEL rules are left out: no editor evaluates them.
    """
    shared: Schema = {}
    kinds = []
    for definition in definitions():
        whole = definition.model.model_json_schema(by_alias=True, schema_generator=WithDefaults)
        shared |= whole.pop("$defs", {})
        whole["properties"].pop("status", None)
        shared[definition.kind] = {**whole, "required": ["apiVersion", "kind", "metadata", "spec"]}
        chosen = {"properties": {"kind": {"const": definition.kind}}, "required": ["kind"]}
        kinds.append({"if": chosen, "then": {"$ref": f"#/$defs/{definition.kind}"}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Mailboat manifest",
        "type": "object",
        "required": ["apiVersion", "kind"],
        "properties": {
            "apiVersion": {"const": names.API_VERSION},
            "kind": {"enum": [definition.kind for definition in definitions()]},
        },
        "allOf": kinds,
        "$defs": _without_rules(shared),
    }


def _without_rules(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _without_rules(value) for name, value in schema.items() if name != RULES}
    return [_without_rules(each) for each in schema] if isinstance(schema, list) else schema


_FIRST: Final = ("rule", "message", "description", "type", "format", "enum", "default", "required")
_NOT_STRUCTURAL: Final = ("title", "const", "$defs", "$ref", "additionalProperties", "propertyNames")
_NOT_IN_STATUS: Final = (RULES, "default", "pattern", "maxLength", "minimum", "maximum")
_LARGEST_INT32: Final = 2**31 - 1
_LARGEST_INT64: Final = 2**63 - 1


class WithDefaults(GenerateJsonSchema):
    """pydantic's generator with durations written as in the documentation."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, Duration):
            return "60s" if dft == Duration.parse("60s") else str(dft)  # the canonical form is 1m
        return super().encode_default(dft)


@dataclass(frozen=True, slots=True)
class _Translation:
    shared: Mapping[str, Schema]
    report: bool
    """Whether the schema is that of a status."""

    def of(self, written: Schema) -> Schema:
        written = self._without_references(written)
        result = _without(written, _NOT_STRUCTURAL)
        if "properties" in written:
            required = written.get("required", ())
            result["properties"] = {
                name: self._property(field, required=name in required) for name, field in written["properties"].items()
            }
        elif "x-kubernetes-preserve-unknown-fields" not in written and (values := written.get("additionalProperties")):
            result["additionalProperties"] = self.of(values)
        if "const" in written:
            result["enum"] = [written["const"]]
        if "items" in written:
            result["items"] = self.of(written["items"])
        if self.report:
            result = _without(result, _NOT_IN_STATUS)
        elif RULES in result:
            result = _without(result, ("pattern", "format"))
            result[RULES] = [_in_order(rule) for rule in result[RULES]]
        _settle_numbers(result)
        if "x-kubernetes-preserve-unknown-fields" in result:
            result.pop(RULES, None)  # CEL rules can't access fields without a schema
        return _in_order(result)

    def _property(self, written: Schema, *, required: bool) -> Schema:
        result = self.of(written)
        if result.get("default", True) in (None, "", [], {}):
            del result["default"]  # null, an empty list, string or mapping: equivalent to absent
        nullable = any(choice.get("type") == "null" for choice in written.get("anyOf", ()))
        if not (required or nullable):
            # Rules run on a mapping's default before the defaults inside it are applied.
            fields = result.get("properties", {})
            if inside := {name: field["default"] for name, field in fields.items() if "default" in field}:
                result["default"] = inside
        return _in_order(result)

    def _without_references(self, written: Schema) -> Schema:
        """Return the schema with its reference merged in. Its own entries (descriptions) take precedence."""
        if reference := written.get("$ref"):
            return {**self._without_references(self.shared[reference.rpartition("/")[2]]), **written}
        if "anyOf" in written and "x-kubernetes-int-or-string" not in written:
            (given,) = (choice for choice in written["anyOf"] if choice.get("type") != "null")
            return {**self._without_references(given), **_without(written, ("anyOf",))}
        return written


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


def _without(schema: Schema, names: Collection[str]) -> Schema:
    return {name: value for name, value in schema.items() if name not in names}


def _in_order(fields: Schema) -> Schema:
    """Order the fields for readers."""
    others = sorted(fields.keys() - set(_FIRST))
    return {name: fields[name] for name in (*_FIRST, *others) if name in fields}
