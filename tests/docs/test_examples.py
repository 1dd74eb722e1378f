"""The examples are valid for the models. ``tests/api/test_examples.py`` validates them on an API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mailboat.runtime.manifest_files import load
from mailboat_spec import Manifests
from mailboat_spec.names import API_VERSION, RELAY_LABEL

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))
MANIFESTS = [file for file in FILES if API_VERSION in file.read_text(encoding="utf-8")]


def name(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def ours(file: Path) -> Manifests:
    """Load the file as the command line does, without resources of other groups."""
    return load([file], needs_relay=False)


def test_there_are_examples() -> None:
    assert {"orders-to-kafka.yaml", "orders-to-pubsub.yaml", "sidecar-job.yaml"} <= {file.name for file in MANIFESTS}
    assert {name(file) for file in FILES} - {name(file) for file in MANIFESTS} == {
        "argocd/argocd-cm.yaml",
        "billing/deployment.yaml",
        "compose/compose.yaml",
    }


@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_an_example_is_whole_and_valid(file: Path) -> None:
    manifests = ours(file)
    assert manifests.subscriptions
    assert len(manifests.relays) == (0 if manifests.subscriptions[0].spec.source is not None else 1)


@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_an_example_begins_with_its_purpose(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") or file.parent.name == "laptop"  # the README shows that example without a comment


@pytest.mark.parametrize("file", [file for file in MANIFESTS if "sidecar" in file.name], ids=name)
def test_the_pods_of_a_sidecar_example_ask_for_its_relay(file: Path) -> None:
    (relay,) = ours(file).relays
    (workload,) = (body for body in documents(file) if body["apiVersion"] != API_VERSION)
    assert workload["spec"]["template"]["metadata"]["labels"][RELAY_LABEL] == relay.metadata.name
