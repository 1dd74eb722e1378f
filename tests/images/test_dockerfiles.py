"""Rules for the text of the Dockerfiles; e2e proves that the images run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ("operator", "relay")


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def dockerfile(image: str) -> str:
    return (ROOT / f"Dockerfile.{image}").read_text(encoding="utf-8")


def final_stage(image: str) -> str:
    return dockerfile(image).split("\nFROM ")[-1]


def test_both_stages_use_one_base_that_can_be_replaced_by_a_digest(image: str) -> None:
    text = dockerfile(image)
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "${BASE}"]
    # With patch version and distribution, so that builds of today and of next year have the same base.
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-slim-[a-z]+$", text, re.MULTILINE)
    assert len({re.findall(r"^ARG BASE=(\S+)", dockerfile(each), re.MULTILINE)[0] for each in IMAGES}) == 1


def test_packages_from_an_index_are_wheels_with_hashes(image: str) -> None:
    commands = re.findall(r"pip[^&\n]* install [^&\n]*", dockerfile(image))
    assert commands
    for command in commands:
        if "wheels/*.whl" in command:
            assert "--no-index" in command
            assert "--no-deps" in command
        else:
            assert "--require-hashes" in command
            assert "--only-binary :all:" in command


def test_the_user_is_a_number_other_than_root(image: str) -> None:
    # With runAsNonRoot, kubelet refuses an image whose user is a name.
    assert re.findall(r"^USER (.*)$", final_stage(image), re.MULTILINE) == ["65532:65532"]


def test_the_image_writes_no_bytecode_and_has_no_pip(image: str) -> None:
    assert "PYTHONDONTWRITEBYTECODE=1" in final_stage(image)
    assert "pip uninstall --yes" in final_stage(image)


def test_an_image_copies_only_its_own_sources(image: str) -> None:
    copied = set(re.findall(r"^COPY (\w+)/ ", dockerfile(image), re.MULTILINE))
    assert copied == {"crds", image}


def test_the_entry_point_is_a_command_of_the_distribution(image: str) -> None:
    found = re.search(r'^ENTRYPOINT \["([\w-]+)"\]$', dockerfile(image), re.MULTILINE)
    assert found is not None
    project = (ROOT / image / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(found[1])} = ", project, re.MULTILINE)


def test_the_build_context_holds_only_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    included = {line[1:] for line in lines if line.startswith("!")}
    copied: set[str] = set()
    for image in IMAGES:
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile(image), re.MULTILINE):
            copied |= {source.rstrip("/") for source in sources.split()}
    assert included == copied
