"""Errors of the API client, classified by the required reaction."""

import json
from collections.abc import Mapping
from typing import Final


class KubeError(Exception):
    """A request to the API server failed."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotFound(KubeError):
    """The object does not exist."""


class Conflict(KubeError):
    """Another writer was faster; read again."""


class Invalid(KubeError):
    """The object is invalid; a retry will not help."""


class Forbidden(KubeError):
    """The operator lacks a permission; a person has to grant it."""


class Throttled(KubeError):
    """Too many requests; retry after ``retry_after`` seconds."""


class ApiUnavailable(KubeError):
    """No answer; retry."""


class ServerFailed(ApiUnavailable):
    """A 5xx answer. It may affect this request only (a third-party admission webhook is down)."""


class NoCluster(KubeError):
    """No cluster is configured: neither a service account nor a kubeconfig."""


_BY_CODE: Final[Mapping[int, type[KubeError]]] = {
    404: NotFound,
    409: Conflict,
    429: Throttled,
    **dict.fromkeys((401, 403), Forbidden),
    **dict.fromkeys((400, 413, 415, 422), Invalid),
}
_WRONG_TYPE: Final = "failed to create typed patch object"
"""In the answer of server-side apply to a field of another type, or one that the schema lacks. The code is 500."""


def answer_error(request: str, code: int, text: str, retry_after: str | None) -> KubeError:
    """Return the error for an answer. The text is a Status, or a proxy's error page, for example."""
    try:
        reason = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        reason = text.strip()[:200] or "no reason given"
    wrong_type = code == 500 and _WRONG_TYPE in reason
    kind = Invalid if wrong_type else _BY_CODE.get(code, ServerFailed)
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return kind(f"{request}: {reason} ({code})", seconds)
