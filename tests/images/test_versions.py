"""All files of a release have the same version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECTS = {
    folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in ("crds", "relay", "operator", "devservers", "demo")
}
VERSION: str = PROJECTS["crds"]["version"]


def test_all_distributions_have_the_version() -> None:
    assert {project["version"] for project in PROJECTS.values()} == {VERSION}


@pytest.mark.parametrize("folder", ["relay", "operator"])
def test_relay_and_operator_require_the_spec_of_the_version(folder: str) -> None:
    assert f"mailboat-spec=={VERSION}" in PROJECTS[folder]["dependencies"]


def test_the_chart_has_and_installs_the_version() -> None:
    chart = yaml.safe_load((ROOT / "charts/mailboat/Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


@pytest.mark.parametrize("file", ["Dockerfile.operator", "Dockerfile.relay", "docs/kubernetes.md"])
def test_dockerfiles_and_docs_have_the_version(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.findall(r"(?:mailboat-(?:operator|relay):|^ARG VERSION=|^Mailboat )(\d+\.\d+\.\d+)", text, re.MULTILINE)
    assert found
    assert set(found) == {VERSION}
