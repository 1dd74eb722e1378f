"""Parts are made once, whole, whoever comes first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mailboat_harbor.cache import cache_dir, made_once


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAILBOAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_environment_decides_where_the_cache_is(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_dir() == own_cache
    monkeypatch.delenv("MAILBOAT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "mailboat"


def test_eight_at_once_make_it_once() -> None:
    made: list[Path] = []
    together = threading.Barrier(8)

    def make(into: Path) -> None:
        made.append(into)
        (into / "program").write_text("content")

    def want() -> Path:
        together.wait()
        return made_once("part-1", make)

    with ThreadPoolExecutor(8) as pool:
        places = {future.result() for future in [pool.submit(want) for _ in range(8)]}
    assert len(made) == 1
    assert [(place / "program").read_text() for place in places] == ["content"]


def test_a_failed_make_leaves_nothing_and_is_tried_again(own_cache: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").write_text("half")
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        made_once("part-1", fail)
    assert not list(own_cache.glob("part-1*.part"))
    assert (made_once("part-1", lambda into: (into / "whole").touch()) / "whole").exists()


def test_what_a_killed_make_left_goes_with_the_next_one(own_cache: Path) -> None:
    killed, other = own_cache / "part-1.abcd1234.part", own_cache / "part-1.2.abcd1234.part"
    for folder in (killed, other):
        folder.mkdir(parents=True)
        (folder / "half").touch()
    made_once("part-1", lambda into: (into / "whole").touch())
    assert not killed.exists()
    assert other.exists(), "somebody may be filling it, under a lock of its own"
