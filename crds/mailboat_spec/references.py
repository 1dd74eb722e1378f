"""References to other objects, all in the namespace of the referring object, and URLs of servers."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, GetJsonSchemaHandler, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mailboat_spec.base import Model
from mailboat_spec.formats import DnsLabel, DnsSubdomain, NonEmpty, SecretKey
from mailboat_spec.redaction import PASSWORD_IN_URL, contains_password
from mailboat_spec.rules import Rule, exactly_one, rule, text


class SecretRef(Model):
    """A whole Secret: every key of it counts."""

    name: DnsSubdomain
    """Name of the Secret, in the namespace of this resource."""


class SecretKeyRef(SecretRef):
    """One value inside a Secret."""

    key: SecretKey
    """Key inside the Secret whose value is used."""


class UsesSecrets(Model):
    """Base of models whose fields may refer to Secrets."""

    def secret_refs(self) -> tuple[SecretRef, ...]:
        """Return all references to Secrets in field order. The operator mounts the Secrets; the relay reads them."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return tuple(value for value in values if isinstance(value, SecretRef))


class RelayRef(Model):
    """The relay that a subscription belongs to."""

    name: DnsLabel
    """Name of the OutboxRelay, in the namespace of this resource."""


class _NothingRequired:
    """Annotation that removes ``required`` from the CRD's schema, so that ``{}`` is valid."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        given, absent = handler(schema)["anyOf"]
        fields = {name: value for name, value in handler.resolve_ref_schema(given).items() if name != "required"}
        return {"anyOf": [fields, absent]}


OptionalSecretRef = Annotated[
    SecretRef | None, BeforeValidator(lambda value: None if value == {} else value), _NothingRequired()
]
"""``configSecretRef: {}`` is equivalent to an absent field."""


_PASSWORD: Final = "holds a password: put the URL in a Secret and refer to it by urlSecretRef"


class Connection(UsesSecrets):
    """Exactly one of ``url`` and ``urlSecretRef``. Subclasses define the accepted schemes."""

    schemes: ClassVar[tuple[str, ...]]
    constraints = exactly_one(
        "url",
        "urlSecretRef",
        none="needs urlSecretRef: {name: ..., key: ...} (or url, if it holds no password)",
        both="has both url and urlSecretRef: remove one of them",
    )

    url: NonEmpty | None = None
    """URL of the server, without a password. Default: none; a URL with a password goes into urlSecretRef."""
    url_secret_ref: SecretKeyRef | None = None
    """Key of a Secret that holds the URL of the server, password included. Default: none; either this or url is
    needed."""

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        yield from super().admission_rules()
        begins = " || ".join(f"self.url.startsWith('{scheme}://')" for scheme in cls.schemes)
        yield rule(f"!has(self.url) || {begins}", cls._begins_wrongly(), field="url")
        # Attached to the object, not to the field: an error on the field would repeat the URL, password included.
        harmless = f"!self.url.matches({text(PASSWORD_IN_URL)})"
        yield rule(f"!has(self.url) || {harmless}", _PASSWORD, field="url", reason="FieldValueForbidden")

    @classmethod
    def _begins_wrongly(cls) -> str:
        return f"must begin with {' or '.join(f'{scheme}://' for scheme in cls.schemes)}"

    @field_validator("url")
    @classmethod
    def _harmless_url(cls, url: str) -> str:
        if not url.startswith(tuple(f"{scheme}://" for scheme in cls.schemes)):
            raise ValueError(cls._begins_wrongly())
        if contains_password(url):
            raise ValueError(_PASSWORD)
        return url
