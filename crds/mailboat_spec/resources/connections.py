"""Address of a server: a URL in a Secret or, without a password, a URL in the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from pydantic import field_validator

from mailboat_spec.formats import NonEmpty
from mailboat_spec.redaction import PASSWORD_IN_URL, contains_password
from mailboat_spec.references import SecretKeyRef, UsesSecrets
from mailboat_spec.rules import Rule, RuleReason, exactly_one, text, unless_given

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
        yield Rule(unless_given("url", begins), cls._begins_wrongly(), field="url")
        # Attached to the object, not to the field: an error on the field would repeat the URL, password included.
        harmless = f"!self.url.matches({text(PASSWORD_IN_URL)})"
        yield Rule(unless_given("url", harmless), _PASSWORD, field="url", reason=RuleReason.FORBIDDEN)

    @classmethod
    def _begins_wrongly(cls) -> str:
        return f"must begin with {' or '.join(f'{scheme}://' for scheme in cls.schemes)}"

    @field_validator("url")
    @classmethod
    def _harmless_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if not url.startswith(tuple(f"{scheme}://" for scheme in cls.schemes)):
            raise ValueError(cls._begins_wrongly())
        if contains_password(url):
            raise ValueError(_PASSWORD)
        return url
