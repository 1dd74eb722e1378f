"""Base of both kinds as Kubernetes objects: apiVersion, metadata, and a leniently parsed status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final, Literal

from pydantic import ValidationError, ValidatorFunctionWrapHandler, field_validator

from mailboat_spec.base import Model
from mailboat_spec.formats import DNS_LABEL
from mailboat_spec.resources.metadata import Metadata
from mailboat_spec.rules import Refusal, Rule

_NO_SERVICE: Final = "must begin with a letter: a Service is named after it, and its name may not begin with a digit"


class Resource(Model):
    """A named object. Subclasses add ``kind``, ``spec`` and ``status``."""

    max_name: ClassVar[int] = DNS_LABEL.max_length
    names_a_service: ClassVar[bool] = False
    """Whether a Service is named after the resource: a Service's name can't begin with a digit."""

    api_version: Literal["mailboat.dev/v1alpha1"] = "mailboat.dev/v1alpha1"
    """Always mailboat.dev/v1alpha1. Default: mailboat.dev/v1alpha1."""
    metadata: Metadata
    """Who the resource is: its name and namespace."""

    def wrong_combinations(self) -> Iterator[Refusal]:
        if len(self.metadata.name) > self.max_name:
            yield Refusal(("metadata", "name"), self._too_long())
        if self.names_a_service and self.metadata.name[0].isdigit():
            yield Refusal(("metadata", "name"), _NO_SERVICE)

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        yield Rule(f"self.metadata.name.size() <= {cls.max_name}", cls._too_long(), field="metadata.name")
        yield Rule(DNS_LABEL.condition("self.metadata.name"), DNS_LABEL.message, field="metadata.name")
        if cls.names_a_service:
            yield Rule("!self.metadata.name.matches('^[0-9]')", _NO_SERVICE, field="metadata.name")

    @classmethod
    def _too_long(cls) -> str:
        return f"is too long: at most {cls.max_name} characters"

    @field_validator("status", mode="wrap", check_fields=False)
    @classmethod
    def _unreadable_status_is_none(cls, value: object, read: ValidatorFunctionWrapHandler) -> object:
        """Replace an unreadable status, perhaps of another version, by None: it must not make a resource invalid."""
        try:
            return read(value)
        except ValidationError:
            return None


def full_name(resource: Resource) -> str:
    """Return ``namespace/name``, the resource's name in messages, metrics and tables."""
    return f"{resource.metadata.namespace}/{resource.metadata.name}"
