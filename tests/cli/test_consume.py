"""``mailboat consume`` with the handlers of an application."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from mailboat import emit
from support.cli import Place, relay_manifest, subscription_manifest
from support.wait import wait_until

HANDLERS = """
import psycopg
from mailboat import Consumer, Event

view = Consumer("shop/view")
nothing = 1

@view.on("order.*")
async def project(order: dict, event: Event, tx: psycopg.AsyncConnection) -> None:
    if order["number"] == 2 and not event.replay:
        raise LookupError("no such wallet")
    await tx.execute("insert into effects (number) values (%s)", [order["number"]])
"""


@pytest.fixture
def pulled(place: Place, tmp_path: Path) -> Place:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    delivery = {"maxAttempts": 2, "backoff": {"initial": "1ms", "max": "1ms"}}
    subscription = subscription_manifest("view", sink={"pull": {}}, delivery=delivery)
    place.write(relay_manifest(place.database.url), subscription)
    place.database.execute("create table effects (ordinal bigserial, number int)")
    return place


def effects(place: Place) -> list[int]:
    return [number for (number,) in place.database.execute("select number from effects order by ordinal")]


def test_it_consumes_dead_letters_are_replayed_in_order_and_it_drains(pulled: Place, tmp_path: Path) -> None:
    assert "subscription shop/view can be pulled" in pulled.ok("migrate")
    with psycopg.connect(pulled.database.url) as connection:
        for number in (1, 2, 3):
            emit(connection, "order.placed", {"number": number}, key="k")
    command = [sys.executable, "-m", "mailboat.cli.main", "consume", "-f", str(pulled.folder), "handlers:view"]
    log = (tmp_path / "log").open("wb")
    consumer = subprocess.Popen(command, cwd=tmp_path, stderr=log, env={**os.environ})
    try:
        wait_until(lambda: effects(pulled) == [1, 3], timeout=60, what="the effects")
        assert "HandlerFailed" in pulled.ok("dlq", "list")
        assert "LookupError: no such wallet" in pulled.ok("dlq", "show", "1")
        with psycopg.connect(pulled.database.url) as connection:
            emit(connection, "order.placed", {"number": 4}, key="k")
        wait_until(lambda: effects(pulled) == [1, 3, 4], timeout=60, what="the next effect")
        pulled.ok("dlq", "replay", "--all")
        wait_until(lambda: effects(pulled) == [1, 3, 4, 2], timeout=60, what="the replayed effect")
        consumer.send_signal(signal.SIGTERM)
        assert consumer.wait(timeout=60) == 0
    finally:
        consumer.kill()
        consumer.wait()
        log.close()


MODULE_IN_IMPORT = "from pathlib import Path; Path('reached').touch(); import time; time.sleep(60)"


@contextmanager
def started_consumer(pulled: Place, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = str(Path(sys.executable).with_name("mailboat"))
    command = [program, "consume", "-f", str(pulled.folder), "handlers:view"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as consumer:
        try:
            yield consumer
        finally:
            consumer.kill()


def test_a_signal_while_the_module_is_imported_ends_it_in_good_order(pulled: Place, tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(MODULE_IN_IMPORT)
    with started_consumer(pulled, tmp_path) as consumer:
        wait_until((tmp_path / "reached").exists, timeout=60, what="the import of the module")
        consumer.send_signal(signal.SIGTERM)
        assert consumer.wait(timeout=30) == 0


def test_a_signal_while_the_database_does_not_answer_ends_it_in_good_order(pulled: Place, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/nowhere"
        pulled.write(relay_manifest(url), subscription_manifest("view", sink={"pull": {}}))
        with started_consumer(pulled, tmp_path) as consumer, silent.accept()[0]:
            consumer.send_signal(signal.SIGTERM)
            assert consumer.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("handlers", "handlers names no consumer: write module:consumer"),
        ("handlers:nothing", "handlers has no mailboat.Consumer called nothing"),
        ("unknown_module:view", "there is no module unknown_module here"),
    ],
)
def test_an_invalid_consumer_target_is_reported(
    pulled: Place, tmp_path: Path, monkeypatch: Any, target: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = pulled.mailboat("consume", target)
    assert (result.exit_code, complaint in result.stderr) == (3, True)
