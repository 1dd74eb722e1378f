"""References to other objects, all in the namespace of the referring object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mailboat_spec.base import Model
from mailboat_spec.formats import DnsLabel, DnsSubdomain, SecretKey


class SecretKeyRef(Model):
    """One value inside a Secret."""

    name: DnsSubdomain
    """Name of the Secret, in the namespace of this resource."""
    key: SecretKey
    """Key inside the Secret whose value is used."""


class SecretRef(Model):
    """A whole Secret: every key of it counts."""

    name: DnsSubdomain
    """Name of the Secret, in the namespace of this resource."""


class UsesSecrets(Model):
    """Base of models whose fields may refer to Secrets."""

    def secret_refs(self) -> tuple[SecretRef | SecretKeyRef, ...]:
        """Return all references to Secrets in field order. The operator mounts the Secrets; the relay reads them."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return tuple(value for value in values if isinstance(value, SecretRef | SecretKeyRef))


class ConfigMapRef(Model):
    """A whole ConfigMap."""

    name: DnsSubdomain
    """Name of the ConfigMap, in the namespace of this resource."""


class RelayRef(Model):
    """The relay that a subscription belongs to."""

    name: DnsLabel
    """Name of the OutboxRelay, in the namespace of this resource."""


def _empty_is_absent(value: object) -> object:
    return None if isinstance(value, Mapping) and not value else value


class _NothingRequired:
    """Annotation that removes ``required`` from the CRD's schema, so that ``{}`` is valid."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        given, absent = handler(schema)["anyOf"]
        fields = {name: value for name, value in handler.resolve_ref_schema(given).items() if name != "required"}
        return {"anyOf": [fields, absent]}


OptionalSecretRef = Annotated[SecretRef | None, BeforeValidator(_empty_is_absent), _NothingRequired()]
"""``configSecretRef: {}`` is equivalent to an absent field."""
