"""Validation of manifests by the API server, without storing them, and the rules of the CRDs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kubernetes import client, config

from mailboat_devservers.kubernetes import ApiServer
from mailboat_spec.crds import definitions
from mailboat_spec.names import GROUP, VERSION

Body = dict[str, Any]
PLURALS = {definition.kind: definition.plural for definition in definitions()}


@dataclass(frozen=True)
class Cause:
    """One cause of a refusal: field and message of the API server."""

    field: str
    message: str

    @property
    def place(self) -> str:
        """Field without indexes and keys, as in ``spec.filter.eventTypes[]``."""
        return re.sub(r"\[[^\]]*\]", "[]", self.field)


class Admission:
    """One namespace of an API server. Requests are those of ``kubectl apply --dry-run=server``."""

    def __init__(self, objects: client.CustomObjectsApi, namespace: str) -> None:
        self._objects = objects
        self._namespace = namespace

    def refusals(self, body: Body) -> list[Cause]:
        """Return the causes that prevent the creation; empty if the manifest is valid."""
        return self._causes(self._objects.create_namespaced_custom_object, PLURALS[body["kind"]], body, dry_run="All")

    def refusals_of_change(self, before: Body, after: Body) -> list[Cause]:
        """Create the first manifest and return the causes that prevent its change to the second."""
        plural, name = PLURALS[before["kind"]], before["metadata"]["name"]
        self._objects.create_namespaced_custom_object(GROUP, VERSION, self._namespace, plural, before)
        try:
            patch = {"spec": after["spec"]}
            return self._causes(self._objects.patch_namespaced_custom_object, plural, name, patch, dry_run="All")
        finally:
            self._objects.delete_namespaced_custom_object(GROUP, VERSION, self._namespace, plural, name)

    def _causes(self, ask: Any, *arguments: Any, **options: Any) -> list[Cause]:
        try:
            ask(GROUP, VERSION, self._namespace, *arguments, field_validation="Strict", **options)
        except client.ApiException as refused:
            status = json.loads(refused.body or "{}")
            causes = (status.get("details") or {}).get("causes")
            if not causes:
                return [Cause("", status["message"])]
            return [Cause(cause.get("field", ""), cause["message"]) for cause in causes]
        return []


@contextmanager
def admission(api: ApiServer, namespace: str) -> Iterator[Admission]:
    """Validate manifests in a namespace of a server."""
    with config.new_client_from_config(config_file=str(api.kubeconfig)) as connection:
        yield Admission(client.CustomObjectsApi(connection), namespace)


@dataclass(frozen=True)
class PlacedRule:
    """One rule of the CRDs and its place in a manifest."""

    kind: str
    place: str
    schema_type: str
    rule: dict[str, str]

    @property
    def blames(self) -> str:
        """Place that the refusal names."""
        return f"{self.place}{self.rule.get('fieldPath', '')}".removeprefix(".")

    @property
    def words(self) -> str:
        """Constant part of the message."""
        if expression := self.rule.get("messageExpression"):
            return str(re.findall(r"'([^']*)'", expression)[-1])
        return self.rule["message"]

    @property
    def about_a_change(self) -> bool:
        return "oldSelf" in self.rule["rule"]

    def __str__(self) -> str:
        return f"{self.kind} {self.blames}: {self.rule['message'][:40]}"


def rules() -> list[PlacedRule]:
    """Return all rules of both kinds."""
    return [rule for definition in definitions() for rule in _rules(definition.kind, "", definition.schema())]


def _rules(kind: str, place: str, schema: Body) -> Iterator[PlacedRule]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield PlacedRule(kind, place, schema.get("type", "scalar"), rule)
    for name, field in schema.get("properties", {}).items():
        yield from _rules(kind, f"{place}.{name}" if place else name, field)
    for inside in ("items", "additionalProperties"):
        if inside in schema:
            yield from _rules(kind, f"{place}[]", schema[inside])
