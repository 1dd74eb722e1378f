"""What both kinds share as Kubernetes objects: apiVersion, metadata, and a status that is never in the way."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from mailboat_spec.base import Model
from mailboat_spec.metadata import Metadata


class Resource(Model):
    """An object with a name. Subclasses add ``kind``, ``spec`` and ``status``."""

    api_version: Literal["mailboat.dev/v1alpha1"] = Field(
        default="mailboat.dev/v1alpha1", description="Always mailboat.dev/v1alpha1. Default: mailboat.dev/v1alpha1."
    )
    metadata: Metadata = Field(description="Who the resource is: its name and namespace.")

    @field_validator("status", mode="wrap", check_fields=False)
    @classmethod
    def _unreadable_status_is_none(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        """A status is only a report, and perhaps one of another version: what can't be read is passed over."""
        try:
            return read(value)
        except ValidationError:
            return None


def full_name(resource: Resource) -> str:
    """``namespace/name``: how a resource is called in messages, metrics and tables."""
    return f"{resource.metadata.namespace}/{resource.metadata.name}"
