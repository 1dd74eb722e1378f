"""Statements of the pages about the code: links resolve, and paths, names and lists match the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click import Context

from mailboat.cli.main import main
from mailboat.errors import SchemaMismatch
from mailboat.store.schema.migrate import known_migrations, pending
from mailboat_operator.resources.pod import CONTAINER, child_name
from mailboat_spec import Reason

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates from the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), f"{name(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(there), f"{name(page)} links to {target}: there is no such heading"


def test_all_pages_state_the_same_idle_guarantee() -> None:
    (table,) = re.findall(r"^\| G8 \| ([^|]*) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    (page,) = re.findall(
        r"^### G8\n\n\*\*(.*)\*\*$", (ROOT / "docs" / "guarantees.md").read_text("utf-8"), re.MULTILINE
    )
    assert table == page


def test_the_index_lists_every_page() -> None:
    listed = re.findall(r"\]\((\w[^)]*)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", ["README.md", "docs/kubernetes.md"])
def test_the_command_line_in_a_cluster_is_called_as_relays_have_it(page: str) -> None:
    commands = re.findall(r"^kubectl .* exec (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert commands
    for command in commands:
        target, _, inside = command.partition(" -- mailboat ")
        assert target in (f"deployment/{child_name('orders')}", f"deployment/shop --container {CONTAINER}")
        assert "-f" not in inside.split(), "the operator's variables say where the manifests are"
        assert main.get_command(Context(main), inside.split()[0]) is not None


CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize(
    "contract", [each for each in CONTRACTS if each["type"] == "layers"], ids=lambda each: each["containers"][0]
)
def test_the_layers_are_those_that_lint_checks(contract: dict[str, Any]) -> None:
    layers = " → ".join(layer.replace("(", "").replace(")", "") for layer in contract["layers"])
    assert layers in " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())


def test_the_report_of_an_older_relay_about_a_migrated_database_is_shown() -> None:
    known = known_migrations()
    with pytest.raises(SchemaMismatch) as refusal:
        pending(known, [(known[-1].version + 1, "0099_future.sql", "x")])
    assert f"\n{refusal.value}\n" in (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def test_every_reason_that_needs_attention_is_explained_with_what_to_do() -> None:
    well = {"Available", "Reachable", "UpToDate", "AllAssigned", "Running", "NothingBlocked", "PausedBySpec"}
    well |= {"Delivering", "Consuming", "Reliable"}
    page = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
    assert {reason for reason in Reason if not re.search(rf"(`|False ){reason}[`:]", page)} <= well | {
        "Delivering",
        "Consuming",
        "Reliable",
    }


def test_every_list_of_packages_is_explained() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+\.in)`", text)) == {file.name for file in (ROOT / "locks").glob("*.in")}


def test_every_guarantee_has_existing_tests() -> None:
    rows = re.findall(r"^\| (G\d+): .* \| (.*) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [guarantee for guarantee, *_ in rows] == [f"G{number}" for number in range(1, 11)]
    for _, *cells in rows:
        for cell in cells:
            for file, _, test in (node.partition("::") for node in re.findall(r"`(.*?)`", cell)):
                assert f"def {test}" in (ROOT / file).read_text(), f"{file} has no {test}"
