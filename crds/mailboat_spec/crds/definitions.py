"""The two CustomResourceDefinitions as plain mappings that can be dumped as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from mailboat_spec import names
from mailboat_spec.base import Model
from mailboat_spec.crds.columns import RELAY_COLUMNS, SUBSCRIPTION_COLUMNS, Column
from mailboat_spec.crds.openapi_schema import Schema, structural_schema
from mailboat_spec.resources.relay import OutboxRelay
from mailboat_spec.resources.resource import Resource
from mailboat_spec.resources.subscription import EventSubscription

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
    singular: str
    short_names: tuple[str, ...]
    model: type[Resource]
    columns: tuple[Column, ...]
    scale: Mapping[str, str] | None = None

    @property
    def file_name(self) -> str:
        """Name of the CRD's file below ``crds/``."""
        return f"{self.plural}.yaml"

    def schema(self) -> Schema:
        """Return the structural schema of the whole object, spec and status."""
        return object_schema(self.model)

    def manifest(self) -> dict[str, Any]:
        """Return the CRD manifest for ``kubectl apply``."""
        version = {
            "name": names.VERSION,
            "served": True,
            "storage": True,
            "subresources": {"status": {}, **({"scale": dict(self.scale)} if self.scale else {})},
            "additionalPrinterColumns": [column.as_schema() for column in self.columns],
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
                    "singular": self.singular,
                    "shortNames": list(self.short_names),
                    "categories": list(names.CATEGORIES),
                },
                "versions": [version],
            },
        }


def definitions() -> tuple[Definition, ...]:
    """Return the definitions of both kinds."""
    return (
        Definition(
            names.RELAY_KIND,
            names.RELAY_PLURAL,
            names.RELAY_SINGULAR,
            names.RELAY_SHORT_NAMES,
            OutboxRelay,
            RELAY_COLUMNS,
            _SCALE,
        ),
        Definition(
            names.SUBSCRIPTION_KIND,
            names.SUBSCRIPTION_PLURAL,
            names.SUBSCRIPTION_SINGULAR,
            names.SUBSCRIPTION_SHORT_NAMES,
            EventSubscription,
            SUBSCRIPTION_COLUMNS,
        ),
    )


def object_schema(model: type[Resource]) -> Schema:
    """Return a resource's schema from its root.

    The API server validates ``metadata`` itself; a CRD schema may only restrict names in it.
    """
    whole = structural_schema(model, report=False)
    fields = whole["properties"]
    for given_by_every_manifest in ("apiVersion", "kind"):
        fields[given_by_every_manifest] = {
            "description": fields[given_by_every_manifest]["description"].partition(" Default:")[0],
            "type": "string",
        }
    fields["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    fields["status"] = {
        "description": fields["status"]["description"],
        **{name: value for name, value in _status_schema(model).items() if name != "description"},
    }
    return {**whole, "required": ["spec"]}


def _status_schema(model: type[Resource]) -> Schema:
    reported = next(choice for choice in get_args(model.model_fields["status"].annotation) if choice is not type(None))
    assert isinstance(reported, type)
    assert issubclass(reported, Model)
    return structural_schema(reported, report=True)
