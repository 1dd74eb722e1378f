"""Pointers to other objects. All of them point into the namespace of the object that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mailboat_spec.base import Model
from mailboat_spec.strings import DnsLabel, DnsSubdomain, SecretKey


class SecretKeyRef(Model):
    """One value inside a Secret."""

    name: DnsSubdomain = Field(description="Name of the Secret, in the namespace of this resource.")
    key: SecretKey = Field(description="Key inside the Secret whose value is used.")


class SecretRef(Model):
    """A whole Secret: every key of it counts."""

    name: DnsSubdomain = Field(description="Name of the Secret, in the namespace of this resource.")


class UsesSecrets(Model):
    """What may refer to Secrets by its fields."""

    def secret_refs(self) -> tuple[SecretRef | SecretKeyRef, ...]:
        """All that it refers to, in the order of its fields: what the operator mounts, and the relay reads."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return tuple(value for value in values if isinstance(value, SecretRef | SecretKeyRef))


class ConfigMapRef(Model):
    """A whole ConfigMap."""

    name: DnsSubdomain = Field(description="Name of the ConfigMap, in the namespace of this resource.")


class RelayRef(Model):
    """The relay that a subscription belongs to."""

    name: DnsLabel = Field(description="Name of the OutboxRelay, in the namespace of this resource.")


def _empty_is_absent(value: object) -> object:
    return None if isinstance(value, Mapping) and not value else value


class _NothingRequired:
    """An annotation for the CRD's side of it: ``{}`` lacks nothing."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        given, absent = handler(schema)["anyOf"]
        fields = {name: value for name, value in handler.resolve_ref_schema(given).items() if name != "required"}
        return {"anyOf": [fields, absent]}


OptionalSecretRef = Annotated[SecretRef | None, BeforeValidator(_empty_is_absent), _NothingRequired()]
"""``configSecretRef: {}`` says as much as leaving it out."""
