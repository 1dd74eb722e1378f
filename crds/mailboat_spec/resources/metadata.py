"""The part of Kubernetes' ObjectMeta that Mailboat reads.

Other fields that a server sets are ignored, so that the output of ``kubectl get -o yaml`` is a valid config file. Other
names (``lables``) are refused like any unknown field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import Field, model_validator

from mailboat_spec.base import Model
from mailboat_spec.formats import DnsLabel
from mailboat_spec.names import DEFAULT_NAMESPACE

_SET_BY_SERVERS: Final = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
    }
)


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
