"""Base of both kinds as Kubernetes objects: apiVersion, metadata, and a leniently parsed status.

The metadata are the part of Kubernetes' ObjectMeta that Mailboat reads. Other fields that a server sets are ignored, so
that the output of ``kubectl get -o yaml`` is a valid config file. Other names (``lables``) are refused like any unknown
field.
"""

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from mailboat_spec.base import Model
from mailboat_spec.formats import DNS_LABEL, DnsLabel
from mailboat_spec.names import DEFAULT_NAMESPACE
from mailboat_spec.rules import Constraint, Predicate

_SET_BY_SERVERS: Final = frozenset(
    {
        "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName",
        "managedFields", "ownerReferences", "resourceVersion", "selfLink",
    }
)  # fmt: skip


class Metadata(Model):
    """Identity of a resource."""

    name: DnsLabel
    """Name of the resource, unique within its namespace and kind."""
    namespace: DnsLabel = DEFAULT_NAMESPACE
    """Namespace of the resource. Default: default."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Labels of the resource. Default: none."""
    annotations: Mapping[str, str] = Field(default_factory=dict)
    """Annotations of the resource. Default: none."""
    uid: str = ""
    """Identity given by the API server: a resource created again under the same name is another one. Default: empty,
    outside Kubernetes."""
    generation: int = Field(default=0, strict=True, ge=0)
    """Counts changes of the spec. Default: 0, outside Kubernetes."""

    @model_validator(mode="before")
    @classmethod
    def _drop_server_fields(cls, data: object) -> object:
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if name not in _SET_BY_SERVERS}
        return data


def name_constraints(longest: int) -> tuple[Constraint, ...]:
    """Return the constraints of a resource's name."""
    short = Predicate(
        f"self.metadata.name.size() <= {longest}", lambda resource: len(resource.metadata.name) <= longest
    )
    return (
        Constraint("metadata.name", f"is too long: at most {longest} characters", short),
        Constraint("metadata.name", DNS_LABEL.message, Predicate(DNS_LABEL.condition("self.metadata.name"))),
    )


class Resource(Model):
    """A named object. Subclasses add ``kind``, ``spec`` and ``status``."""

    constraints = name_constraints(DNS_LABEL.max_length)

    api_version: Literal["mailboat.dev/v1alpha1"] = "mailboat.dev/v1alpha1"
    """Always mailboat.dev/v1alpha1. Default: mailboat.dev/v1alpha1."""
    metadata: Metadata
    """Who the resource is: its name and namespace."""

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
