"""The chart, rendered by the real Helm."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mailboat_devservers.kubernetes_programs import kubernetes_program

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "mailboat"
RELEASE = "mailboat"
NAMESPACE = "mailboat-system"
COMMON = ("--namespace", NAMESPACE, "--kube-version", "1.34.0")

Document = dict[str, Any]


def variants() -> list[str]:
    """Return the names of all sets of values under ``ci/``."""
    names = sorted(file.name.removesuffix("-values.yaml") for file in (CHART / "ci").glob("*-values.yaml"))
    assert {"default", "ha", "restricted"} <= set(names)
    return names


def values_of(variant: str) -> Path:
    return CHART / "ci" / f"{variant}-values.yaml"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm without the machine's configuration and cluster."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [str(kubernetes_program("helm")), *arguments],
            env={"HOME": home, "PATH": "/usr/bin:/bin", "KUBECONFIG": f"{home}/none"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@functools.cache  # many tests share the text
def manifest(variant: str = "default", *arguments: str) -> str:
    """Return the rendered release, hooks included."""
    done = helm("template", RELEASE, str(CHART), *COMMON, "--values", str(values_of(variant)), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(variant: str = "default", *arguments: str) -> list[Document]:
    """Return all documents of the release."""
    return [document for document in yaml.load_all(manifest(variant, *arguments), yaml.CSafeLoader) if document]


def one(documents: list[Document], kind: str, name: str | None = None) -> Document:
    """Return the only document of a kind (and name)."""
    found = [each for each in documents if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} documents of kind {kind} called {name}: {[names(each) for each in found]}"
    return found[0]


def names(document: Mapping[str, Any]) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return document["kind"], metadata.get("namespace", ""), metadata["name"]
