"""Pointers to other objects. All of them point into the namespace of the object that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from mailboat_spec.base import Model
from mailboat_spec.strings import DnsLabel, DnsSubdomain, SecretKey


class SecretKeyRef(Model):
    """One value inside a Secret."""

    name: DnsSubdomain = Field(description="Name of the Secret, in the namespace of this resource.")
    key: SecretKey = Field(description="Key inside the Secret whose value is used.")


class SecretRef(Model):
    """A whole Secret: every key of it counts."""

    name: DnsSubdomain = Field(description="Name of the Secret, in the namespace of this resource.")


class ConfigMapRef(Model):
    """A whole ConfigMap."""

    name: DnsSubdomain = Field(description="Name of the ConfigMap, in the namespace of this resource.")


class RelayRef(Model):
    """The relay that a subscription belongs to."""

    name: DnsLabel = Field(description="Name of the OutboxRelay, in the namespace of this resource.")


def _empty_is_absent(value: object) -> object:
    return None if isinstance(value, Mapping) and not value else value


OptionalSecretRef = Annotated[SecretRef | None, BeforeValidator(_empty_is_absent)]
"""``configSecretRef: {}`` says as much as leaving it out."""
