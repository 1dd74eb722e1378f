"""The consumers in Go, Java and Node behave as their page describes, if their toolchain is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from mailboat import emit
from mailboat_devservers.maven import copy_artifact
from mailboat_devservers.postgres import Database
from support.pull_consumers import declare

EXAMPLES = Path(__file__).parents[2] / "examples/consumers"


def go(folder: Path, url: str) -> list[str]:
    _run(folder, "go", "build", "-o", "orders-view", ".")
    return [str(folder / "orders-view"), f"{url}?sslmode=disable"]


def java(folder: Path, url: str) -> list[str]:
    jar = copy_artifact("org.postgresql:postgresql:42.7.7", folder)
    _run(folder, "javac", "-cp", str(jar), "OrdersView.java")
    server, _, database = url.removeprefix("postgresql://postgres@").partition("/")
    return ["java", "-cp", f"{jar}:{folder}", "OrdersView", f"jdbc:postgresql://{server}/{database}?user=postgres"]


def node(folder: Path, url: str) -> list[str]:
    _run(folder, "npm", "install", "--no-audit", "--no-fund")
    return ["node", str(folder / "orders-view.mjs"), url]


def _run(folder: Path, *command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def outbox(outbox: Database) -> Database:
    outbox.execute("create table orders_view (ordinal bigserial, event_id uuid primary key, number int)")
    return outbox


@pytest.mark.verify
@pytest.mark.parametrize("build", [go, java, node])
def test_an_example_handles_every_event_once_and_refuses_invalid_ones(
    outbox: Database, tmp_path: Path, build: Callable[[Path, str], list[str]]
) -> None:
    declare(outbox, name="orders-view", delivery={"maxAttempts": 1})
    with psycopg.connect(outbox.url) as connection:
        for number in [*range(1, 151), -1, *range(151, 301)]:
            emit(connection, "order.placed", {"number": number}, key="k")
    folder = tmp_path / build.__name__
    shutil.copytree(EXAMPLES / build.__name__, folder)
    _run(folder, *build(folder, outbox.url))
    effects = [number for (number,) in outbox.execute("select number from orders_view order by ordinal")]
    assert effects == list(range(1, 301))
    assert outbox.execute("select reason, attempts from mailboat.dead_letters") == [("HandlerFailed", 1)]
