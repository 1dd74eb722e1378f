"""The two CustomResourceDefinitions as plain mappings, and the JSON Schema of a manifest for editors.

A printer column of ``kubectl get`` is one path into the object. Values that need arithmetic (``1/2``, ``100000+``) are
therefore status fields that the operator writes for this purpose. The columns stand in reading order: health,
destination, lag, reason of a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, get_args

from mailboat_spec import names
from mailboat_spec.base import Model
from mailboat_spec.crds.openapi_schema import Schema, WithDefaults, structural_schema
from mailboat_spec.resources.relay import OutboxRelay
from mailboat_spec.resources.resource import Resource
from mailboat_spec.resources.status import ConditionType
from mailboat_spec.resources.subscription import EventSubscription
from mailboat_spec.rules import RULES

_WIDE: Final = {"priority": 1}
"""Extension of a column that only ``kubectl get -o wide`` prints."""


def _column(name: str, path: str, description: str, type: str = "string") -> Schema:
    """Return an entry of ``additionalPrinterColumns``. kubectl prints the name in capitals."""
    return {"name": name, "type": type, "jsonPath": path, "description": description}


def _of_ready(field: str) -> str:
    return f'.status.conditions[?(@.type=="{ConditionType.READY}")].{field}'


_READY: Final = _column("Ready", _of_ready("status"), "Whether all that the spec asks for is there.")
_STATUS: Final = _column("Status", _of_ready("reason"), "Why it is ready or not, in one word.")
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

    @property
    def file_name(self) -> str:
        """Name of the CRD's file below ``crds/``."""
        return f"{self.plural}.yaml"

    def schema(self) -> Schema:
        """Return the structural schema of the whole object, spec and status.

        The API server validates ``metadata`` itself; a CRD schema may only restrict names in it.
        """
        whole = structural_schema(self.model, report=False)
        fields = whole["properties"]
        for always_given in ("apiVersion", "kind"):
            description = fields[always_given]["description"].partition(" Default:")[0]
            fields[always_given] = {"description": description, "type": "string"}
        fields["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
        reported, _ = get_args(self.model.model_fields["status"].annotation)
        assert issubclass(reported, Model)
        fields["status"] = structural_schema(reported, report=True) | {"description": fields["status"]["description"]}
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
    """Return the definitions of both kinds."""
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
