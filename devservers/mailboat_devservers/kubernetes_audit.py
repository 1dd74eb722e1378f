"""Reader of a Kubernetes API server's audit log, for tests that count requests.

The server logs a request before its response is complete. A client that has read the response finds the request here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
# Requests of the server to itself.
- {level: None, users: ["system:apiserver"]}
- {level: None, nonResourceURLs: ["/readyz*", "/livez*", "/healthz*"]}
- {level: Metadata}
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the API server. ``verb`` is Kubernetes' term: get, list, watch, create, patch, ..."""

    user: str
    verb: str
    resource: str
    """Plural name with the subresource, if any: ``deployments``, ``outboxrelays/status``; otherwise the path."""
    namespace: str
    name: str
    code: int

    def __str__(self) -> str:
        place = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.user}: {self.verb} {self.resource} {place} -> {self.code}"


def read_requests(log: Path, offset: int = 0) -> list[Request]:
    """Return the requests in the log from that byte on, each once."""
    found: dict[str, Request] = {}
    for line in _whole_lines(log, offset):
        entry = json.loads(line)
        # A watch is logged at its start and at its end.
        found.setdefault(entry["auditID"], _request(entry))
    return list(found.values())


def _whole_lines(log: Path, offset: int) -> Iterator[bytes]:
    if not log.exists():
        return
    with log.open("rb") as file:
        if offset:  # may lie within a line that was being written
            file.seek(offset - 1)
            file.readline()
        for line in file:
            if line.endswith(b"\n"):  # otherwise still being written
                yield line


def _request(entry: dict[str, object]) -> Request:
    target = _part(entry, "objectRef")
    resource = "/".join(str(target[part]) for part in ("resource", "subresource") if target.get(part))
    code = _part(entry, "responseStatus").get("code", 0)
    return Request(
        user=str(_part(entry, "user").get("username", "")),
        verb=str(entry.get("verb", "")),
        resource=resource or str(entry.get("requestURI", "")),
        namespace=str(target.get("namespace", "")),
        name=str(target.get("name", "")),
        code=code if isinstance(code, int) else 0,
    )


def _part(entry: dict[str, object], name: str) -> dict[str, object]:
    part = entry.get(name)
    return part if isinstance(part, dict) else {}
