"""The billing example, run without changes except for addresses: a FastAPI service, a relay, Kafka, a consumer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import URLError

from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres import Database
from mailboat_devservers.redis_server import RedisServer
from support.wait import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "billing"


@contextmanager
def program(folder: Path, name: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of the example. At the end the program must drain. Otherwise the error contains its log."""
    command = [sys.executable, "-m", *arguments]
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=log, env={**os.environ, **environment})
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM), (folder / f"{name}.log").read_text()
    finally:
        process.kill()
        process.wait()


def post(address: str, total: str) -> str | None:
    """Place an order and return the id of its event, or None while the service starts."""
    body = json.dumps({"total": total}).encode()
    request = urllib.request.Request(f"{address}/orders", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            event: str = json.load(answer)["event"]
            return event
    except URLError:
        return None


def test_orders_are_charged_once_and_all_drain(
    kfake: KafkaServer,
    valkey: RedisServer,
    outbox: Database,
    kafka_topic: Callable[[KafkaServer], str],
    tmp_path: Path,
) -> None:
    topic, port = kafka_topic(kfake), free_port()
    kfake.create_topic(f"{topic}.billing.dead", 1)
    for name in ("billing.py", "orders.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    for name in ("billing.yaml", "orders.yaml"):
        text = (EXAMPLE / name).read_text().replace("kafka:9092", kfake.bootstrap)
        (tmp_path / name).write_text(re.sub(r"topic: orders\b", f"topic: {topic}", text))
    mailboat = "mailboat.cli.main"
    with ExitStack() as programs:
        address = ("--host", "127.0.0.1", "--port", str(port))
        programs.enter_context(program(tmp_path, "orders", "uvicorn", "orders:app", *address, DATABASE_URL=outbox.url))
        secret = {"MAILBOAT_SECRET_ORDERS_DB_URL": outbox.url}
        relay = ("run", "-f", "orders.yaml", "--listen", "127.0.0.1:0")
        programs.enter_context(program(tmp_path, "relay", mailboat, *relay, **secret))
        consume = ("consume", "-f", "billing.yaml", "billing:billing")
        programs.enter_context(program(tmp_path, "billing", mailboat, *consume, MAILBOAT_SECRET_REDIS_URL=valkey.url))
        first = wait_until(lambda: post(f"http://127.0.0.1:{port}", "12.50"), timeout=60, what="the service")
        refused, second = (post(f"http://127.0.0.1:{port}", total) for total in ("-1", "7"))
        charges = tmp_path / "billing.out"
        wait_until(lambda: charges.read_text().count("\n") == 2, timeout=60, what="two charges")
    charged = set(re.findall(r"charged (\S+) for o-\w+, idempotency key (\S+)", charges.read_text()))
    assert charged == {("12.50", first), ("7", second)}
    assert refused is not None
    assert outbox.execute("select count(*) from orders") == [(3,)]
