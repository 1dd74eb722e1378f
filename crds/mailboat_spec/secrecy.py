"""What must not stand in a manifest: secrets in plain text.

Manifests are kept in Git, shown by ``kubectl get -o yaml`` and copied into annotations. A password goes into a
Secret, and the manifest refers to it. This module only recognises; the models say what to do instead, and never
repeat the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final
from urllib.parse import parse_qsl

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_ENDINGS: Final = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credential",
    "credentials",
    "jaas",
    "apikey",
    "authorization",
    "cookie",
)
_SECRET_PAIRS: Final = {
    ("access", "key"),
    ("api", "key"),
    ("key", "pem"),
    ("private", "key"),
    ("signing", "key"),
    ("ssl", "key"),
}
_NOT_THE_SECRET_ITSELF: Final = {"ref", "location", "path", "file", "url", "uri", "endpoint", "name", "id", "type"}
_SECRET_PARAMETERS: Final = {"password", "sslpassword", "passwd"}


def looks_secret(name: str, value: object = "") -> bool:
    """Whether a setting of this name (``sasl.password``, ``X-Api-Key``, ``PGPASSWORD``) or this value is a secret."""
    if isinstance(value, str) and "PRIVATE KEY-----" in value:
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _NOT_THE_SECRET_ITSELF:
        return False
    return (
        words[-1] == "token"
        or any(word.endswith(_SECRET_ENDINGS) for word in words)
        or any(pair in _SECRET_PAIRS for pair in pairwise(words))
    )


def secret_names(settings: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings, nested ones included, that hold a secret in plain text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from secret_names(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float) and looks_secret(str(name), value):
            yield f"{prefix}{name}"


def holds_password(url: str) -> bool:
    """Whether a URL carries a password: before the host, or as a parameter.

    Errs on the side of yes. A password that should have been percent-encoded (``#``, ``?`` or ``/`` in it) moves the
    borders of what a URL parser takes for the host, so this looks at the text instead.
    """
    _, _, rest = url.partition("://")
    before_parameters, _, parameters = rest.partition("?")
    authority = rest.partition("/")[0]
    for part in (authority, before_parameters):
        user, at, _ = part.rpartition("@")
        if at and user.partition(":")[2]:
            return True
    return any(name.lower() in _SECRET_PARAMETERS and value for name, value in parse_qsl(parameters))
