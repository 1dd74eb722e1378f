"""What story 7 upgrades from: the last release that would be installed otherwise, and nothing where nothing would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from earlier import first_that_differs, revisions

NEEDED = ("charts/mailboat/Chart.yaml", "Dockerfile.operator", "Dockerfile.relay")


class Checkout:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet")
        self.commit("README.md")
        self.git("tag", "v0.0.1")  # there was nothing to install yet

    def git(self, *arguments: str) -> str:
        own = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *own, *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, *files: str) -> str:
        for name in files:
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as end:
                end.write("another line\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", f"changes {' '.join(files)}")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_is_the_last_release(checkout: Checkout):
    first = checkout.commit(*NEEDED)
    for version in ("v0.9.0", "v0.10.0"):
        checkout.commit("relay/code.py")
        checkout.git("tag", version)
    checkout.commit("relay/code.py")
    assert revisions(checkout.root) == ["v0.10.0", "v0.9.0", first]
    assert first_that_differs(checkout.root) == "v0.10.0"


def test_after_a_commit_that_changes_no_more_than_pages_it_is_the_release_before(checkout: Checkout):
    checkout.commit(*NEEDED)
    for version in ("v0.1.0", "v0.2.0"):
        checkout.commit("operator/code.py")
        checkout.git("tag", version)
    checkout.commit("docs/page.md")
    assert first_that_differs(checkout.root) == "v0.1.0"


def test_while_there_is_no_release_it_is_the_first_commit_that_could_be_installed(checkout: Checkout):
    first = checkout.commit(*NEEDED)
    checkout.commit("charts/mailboat/values.yaml")
    assert first_that_differs(checkout.root) == first


def test_where_nothing_has_changed_since_there_is_history_but_nothing_to_upgrade_from(checkout: Checkout):
    first = checkout.commit(*NEEDED)
    checkout.commit("docs/page.md")
    assert revisions(checkout.root) == [first]
    assert first_that_differs(checkout.root) is None


def test_a_clone_without_depth_has_no_history(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory):
    checkout.commit(*NEEDED)
    checkout.commit("relay/code.py")
    clone = tmp_path_factory.mktemp("clone")
    checkout.git("clone", "--quiet", "--depth=1", f"file://{checkout.root}", str(clone))
    assert revisions(clone) == []
    assert first_that_differs(clone) is None


def test_nor_has_an_archive(tmp_path: Path):
    assert revisions(tmp_path) == []
