"""Additions to the pods of a relay. Used by the operator; ignored outside Kubernetes."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from mailboat_spec.base import Model
from mailboat_spec.formats import DnsSubdomain, EnvName, Form
from mailboat_spec.redaction import NOT_THE_SECRET_ITSELF, SECRET_NAME, is_secret_setting
from mailboat_spec.references import SecretRef
from mailboat_spec.rules import FREE_FORM, Constraint, Predicate, absent, int_or_string, keyed_by, text

_QUANTITY: Final = Form(
    r"[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?",
    'is not a quantity: write it like "500m", "2" or "256Mi"',
    max_length=32,
)


def _number_as_text(value: object) -> object:
    """Convert numbers to text: Kubernetes treats ``cpu: 1`` and ``cpu: "1"`` alike."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    _QUANTITY,
    WithJsonSchema(int_or_string(_QUANTITY.condition(), _QUANTITY.message, maxLength=_QUANTITY.max_length)),
]


class Resources(Model):
    """Compute resources of the relay's container."""

    requests: Mapping[str, Quantity] = Field(default_factory=dict, max_length=32)
    """What it is promised. Default: none."""
    limits: Mapping[str, Quantity] = Field(default_factory=dict, max_length=32)
    """What it may use at most. Default: none."""


_HARMLESS: Final = Predicate(
    "!has(self.value) || self.value == '' || !self.value.contains('PRIVATE KEY-----') && "
    f"(!self.name.matches({text(SECRET_NAME)}) || self.name.matches({text(NOT_THE_SECRET_ITSELF)}))",
    lambda variable: not variable.value or not is_secret_setting(variable.name, variable.value),
)


class EnvVar(Model):
    """One environment variable of the relay's container."""

    constraints = (
        Constraint("", "has both value and valueFrom: remove one of them", absent("value") | absent("valueFrom")),
        Constraint(
            "value",
            "is a secret and must not be written here: put it in a Secret and use "
            "valueFrom: {secretKeyRef: {name: ..., key: ...}}",
            _HARMLESS,
            "FieldValueForbidden",
        ),
    )

    name: EnvName
    """Name of the variable."""
    value: str | None = Field(default=None, max_length=32_768)
    """Its value; secrets go into valueFrom. Default: empty."""
    value_from: Mapping[str, Any] | None = Field(default=None, json_schema_extra=FREE_FORM)
    """Where its value comes from (secretKeyRef, configMapKeyRef, fieldRef, ...). Default: none."""


class Toleration(Model):
    """A taint that the relay's pods put up with."""

    key: str | None = Field(default=None, max_length=317)
    """Key of the taint. Default: none, every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists or Equal. Default: Equal."""
    value: str | None = Field(default=None, max_length=63)
    """Value of the taint, for Equal. Default: none."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """NoSchedule, PreferNoSchedule or NoExecute. Default: none, every effect."""
    toleration_seconds: int | None = Field(default=None, strict=True)
    """Seconds to stay on after NoExecute. Default: no limit."""


class PodTemplate(Model):
    """Additions to the relay's pods. A change of them rolls the pods."""

    labels: Mapping[str, str] = Field(default_factory=dict)
    """Further labels. Default: none."""
    annotations: Mapping[str, str] = Field(default_factory=dict)
    """Further annotations. Default: none."""
    resources: Resources = Field(default_factory=Resources)
    """Compute resources of the relay's container. Default: the operator's."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128, json_schema_extra=keyed_by("name"))
    """Further environment variables. Default: none."""
    node_selector: Mapping[str, str] = Field(default_factory=dict)
    """Labels of the nodes that pods may run on. Default: none, all nodes."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64)
    """Taints that pods put up with. Default: none."""
    affinity: Mapping[str, Any] = Field(default_factory=dict, json_schema_extra=FREE_FORM)
    """Kubernetes' affinity of a pod, passed on as it is. Default: none."""
    service_account_name: DnsSubdomain | None = None
    """Service account of the pods. Default: none, one without a token is made."""
    image_pull_secrets: tuple[SecretRef, ...] = Field(default=(), max_length=32, json_schema_extra=keyed_by("name"))
    """Secrets for pulling the relay's image. Default: none."""
    security_context: Mapping[str, Any] = Field(default_factory=dict, json_schema_extra=FREE_FORM)
    """Security context of the relay's container, merged over the restricted one. Default: none."""
