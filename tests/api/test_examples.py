"""Every example is accepted by a real API server without changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mailboat_devservers.kubernetes import ApiServer

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(file for file in EXAMPLES.rglob("*.yaml") if file.parent.name != "compose")


@pytest.fixture(scope="module")
def ready(api: ApiServer) -> ApiServer:
    """The API server with the namespaces that the examples use."""
    for name in ("shop", "argocd"):
        if api.try_kubectl("get", "namespace", name).status != 0:
            api.kubectl("create", "namespace", name)
    return api


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_an_example_is_taken_by_the_server(ready: ApiServer, file: Path) -> None:
    """By default ``kubectl`` requests strict validation, so the server rejects unknown fields."""
    out = ready.kubectl("apply", "--dry-run=server", "--filename", str(file))
    assert "(server dry run)" in out
