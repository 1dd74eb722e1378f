"""Detection of plain-text secrets, which must appear neither in manifests nor in logs.

Manifests are kept in Git, shown by ``kubectl get -o yaml`` and copied into annotations. A password belongs in a
Secret that the manifest refers to. This module only detects secrets; the models' error messages name the remedy and
never repeat the value. Operator and relay redact their logs by the same rules.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final
from urllib.parse import parse_qsl

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_ENDINGS: Final = (
    "password", "passwd", "passphrase", "secret", "credential", "credentials", "jaas", "apikey", "authorization",
    "cookie",
)  # fmt: skip
_SECRET_PAIRS: Final = {
    ("access", "key"), ("api", "key"), ("key", "pem"), ("private", "key"), ("signing", "key"), ("ssl", "key"),
}  # fmt: skip
_NOT_THE_SECRET_ITSELF: Final = {"ref", "location", "path", "file", "url", "uri", "endpoint", "name", "id", "type"}
_SECRET_PARAMETERS: Final = {"password", "sslpassword", "passwd"}

# The same rules in RE2, for the CRDs. Every name that these expressions match is a secret by the functions below. The
# reverse does not hold: words are split by separators only, so only the operator refuses some camelCase names.


def _spelled_out(words: Iterable[str], end: str) -> str:
    """Return an expression for the words in lower case, capitalised and in upper case, each with its word boundary."""
    ordered = sorted(words)
    small = "|".join((*ordered, *(word.capitalize() for word in ordered)))
    return f"(?:(?:{small})(?:[^a-z]|{end})|(?:{'|'.join(word.upper() for word in ordered)})(?:[^A-Za-z]|{end}))"


_PAIRS_IN_RE2: Final = "|".join(
    "[-._]".join(map(spelling, pair))
    for spelling in (str.lower, str.capitalize, str.upper)
    for pair in sorted(_SECRET_PAIRS)
)
SECRET_NAME: Final = (
    f"{_spelled_out(_SECRET_ENDINGS, '$')}|(?:^|[^A-Za-z])(?:(?:{_PAIRS_IN_RE2})(?:[^A-Za-z]|$)|(?:token|Token|TOKEN)$)"
)
"""Names of settings that hold a secret, unless they end in one of ``NOT_THE_SECRET_ITSELF``."""
NOT_THE_SECRET_ITSELF: Final = f"(?i:{'|'.join(sorted(_NOT_THE_SECRET_ITSELF))})[^A-Za-z0-9]*$"
PASSWORD_IN_URL: Final = (
    r"^[a-z]*://(?:[^/]*:[^/]+@|[^?]*:[^?]+@|[^?]*[?](?:.*&)?"
    rf"(?i:{'|'.join(sorted(_SECRET_PARAMETERS))})=[^&])"
)
"""URLs that carry a password."""


def is_secret_setting(name: str, value: object = "") -> bool:
    """Return whether the name (``sasl.password``, ``X-Api-Key``, ``PGPASSWORD``) or the value is that of a secret."""
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
    """Yield the dotted names of all settings, nested ones included, that hold a secret in plain text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from secret_names(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float) and is_secret_setting(str(name), value):
            yield f"{prefix}{name}"


def contains_password(url: str) -> bool:
    """Return whether a URL carries a password, before the host or as a parameter.

    False positives are possible. A password that should have been percent-encoded (``#``, ``?`` or ``/`` in it) shifts
    the host in a URL parser, so the function scans the text instead.
    """
    _, _, rest = url.partition("://")
    before_parameters, _, parameters = rest.partition("?")
    authority = rest.partition("/")[0]
    for part in (authority, before_parameters):
        user, at, _ = part.rpartition("@")
        if at and user.partition(":")[2]:
            return True
    return any(name.lower() in _SECRET_PARAMETERS and value for name, value in parse_qsl(parameters))


BLOT: Final = "***"

# The first group of each expression is kept. The expressions over-match on purpose: `\S*` extends to the last @ of a
# word, because a password that should have been percent-encoded may contain an @.
_IN_TEXT: Final = (
    re.compile(r"(\bbearer\s+)[\w.~+/-]{16,}=*", re.IGNORECASE),
    re.compile(r"(\b)eyJ[\w-]{8,}\.[\w-]+\.[\w-]*"),  # a JWT anywhere in the text
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)\S*(?=@)", re.IGNORECASE),
    re.compile(r"(pass(?:word|wd|phrase)?\s*=\s*)(?:'[^']*'|\"[^\"]*\"|[^\s&;,'\"]+)", re.IGNORECASE),
    re.compile(r"([\"']\S*(?:password|passphrase|secret|token)[\"']\s*:\s*)(?:\"[^\"]*\"|'[^']*')", re.IGNORECASE),
)


def redact(text: str) -> str:
    """Return the text with every suspected secret replaced by ``BLOT``."""
    for pattern in _IN_TEXT:
        text = pattern.sub(rf"\g<1>{BLOT}", text)
    return text


_DETAILS: Final = re.compile(r"^(?:DETAIL|HINT|CONTEXT|QUERY|STATEMENT|LINE \d+):", re.MULTILINE)


def primary_message(error: BaseException) -> str:
    """Return the primary message of a vendor's error, redacted.

    DETAIL and CONTEXT of a database error are dropped: they repeat rows and parameters, including payloads.
    """
    text = getattr(getattr(error, "diag", None), "message_primary", None) or str(error)
    return redact(_DETAILS.split(text, maxsplit=1)[0].strip()) or type(error).__name__


def forget_details(error: BaseException | None, *, seen: frozenset[int] = frozenset()) -> None:
    """Reduce a database error and all errors chained to it to the primary message: a traceback prints all of them."""
    if error is None or id(error) in seen:
        return
    if hasattr(error, "diag"):
        error.args = (primary_message(error),)
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        forget_details(other, seen=seen | {id(error)})
