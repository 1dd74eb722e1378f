"""JSON Schema of a manifest for editors: completion, descriptions and checks while typing.

Unlike the structural schemas of the CRDs it keeps references and refuses unknown fields, which an API server does by
itself. CEL rules are left out: no editor evaluates them.
"""

from __future__ import annotations

from typing import Any

from mailboat_spec import names
from mailboat_spec.cel_rules import RULES
from mailboat_spec.crds.definitions import definitions
from mailboat_spec.crds.openapi_schema import Schema, WithDefaults


def json_schema() -> Schema:
    """Return the schema of one document: that of the kind which the document names."""
    shared: Schema = {}
    kinds = []
    for definition in definitions():
        whole = definition.model.model_json_schema(by_alias=True, schema_generator=WithDefaults)
        shared |= whole.pop("$defs", {})
        whole["properties"].pop("status", None)
        shared[definition.kind] = {**whole, "required": ["apiVersion", "kind", "metadata", "spec"]}
        chosen = {"properties": {"kind": {"const": definition.kind}}, "required": ["kind"]}
        kinds.append({"if": chosen, "then": {"$ref": f"#/$defs/{definition.kind}"}})
    without_rules: Schema = _without_rules(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Mailboat manifest",
            "type": "object",
            "required": ["apiVersion", "kind"],
            "properties": {
                "apiVersion": {"const": names.API_VERSION},
                "kind": {"enum": [definition.kind for definition in definitions()]},
            },
            "allOf": kinds,
            "$defs": shared,
        }
    )
    return without_rules


def _without_rules(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _without_rules(value) for name, value in schema.items() if name != RULES}
    return [_without_rules(each) for each in schema] if isinstance(schema, list) else schema
