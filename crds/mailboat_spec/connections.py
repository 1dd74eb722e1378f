"""Where a server is: a URL in a Secret or, as long as it holds no password, a URL in the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, field_validator

from mailboat_spec.base import Model, Refusal
from mailboat_spec.references import SecretKeyRef
from mailboat_spec.secrecy import holds_password
from mailboat_spec.strings import NonEmpty


class Connection(Model):
    """Exactly one of ``url`` and ``urlSecretRef``. Subclasses say which schemes they take."""

    schemes: ClassVar[tuple[str, ...]]

    url: NonEmpty | None = Field(
        default=None,
        description="URL of the server, without a password. Default: none; a URL with a password goes into "
        "urlSecretRef.",
    )
    url_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Key of a Secret that holds the URL of the server, password included. Default: none; either this "
        "or "
        "url is needed.",
    )

    def wrong_combinations(self) -> Iterator[Refusal]:
        if self.url is None and self.url_secret_ref is None:
            yield Refusal((), "needs urlSecretRef: {name: ..., key: ...} (or url, if it holds no password)")
        elif self.url is not None and self.url_secret_ref is not None:
            yield Refusal((), "has both url and urlSecretRef: remove one of them")

    @field_validator("url")
    @classmethod
    def _harmless_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if not url.startswith(tuple(f"{scheme}://" for scheme in cls.schemes)):
            raise ValueError(f"must begin with {' or '.join(f'{scheme}://' for scheme in cls.schemes)}")
        if holds_password(url):
            raise ValueError("holds a password: put the URL in a Secret and refer to it by urlSecretRef")
        return url
