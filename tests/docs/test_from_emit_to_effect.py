"""The tutorial works as written: its manifests, its programs and its test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from mailboat_devservers.postgres import Database
from support.wait import wait_until

PAGE = Path(__file__).parents[2] / "docs/from-emit-to-effect.md"


def test_the_programs_of_the_page_run_and_deliver(outbox: Database, tmp_path: Path) -> None:
    manifests, place, totals, test = re.findall(r"^```(?:yaml|python)\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    for name, content in {"shop.yaml": manifests, "place.py": place, "totals.py": totals, "test_it.py": test}.items():
        (tmp_path / name).write_text(content)
    env = {**os.environ, "DATABASE_URL": outbox.url, "MAILBOAT_SECRET_ORDERS_DB_URL": outbox.url}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    mailboat = ("-m", "mailboat.cli.main")
    assert "subscription shop/totals can be pulled" in run(*mailboat, "migrate", "-f", "shop.yaml")
    run("place.py", "ada:5", "bob:7", "ada:10")
    consumer = subprocess.Popen(
        [sys.executable, *mailboat, "consume", "-f", "shop.yaml", "totals:consumer"], cwd=tmp_path, env=env
    )
    try:
        wait_until(lambda: _totals(outbox) == {"ada": 15, "bob": 7}, timeout=60, what="the totals")
        run("place.py", "bob:-1", "bob:3")
        wait_until(lambda: _totals(outbox) == {"ada": 15, "bob": 10}, timeout=60, what="bob's next order")
        assert "a total can't be negative" in run(*mailboat, "dlq", "list", "-f", "shop.yaml")
        consumer.send_signal(signal.SIGTERM)
        assert consumer.wait(timeout=60) == 0
    finally:
        consumer.kill()
        consumer.wait()
    assert "1 passed" in run("-m", "pytest", "-q", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", "test_it.py")


def _totals(outbox: Database) -> dict[str, Any]:
    try:
        return dict(outbox.execute("select customer, total from totals"))
    except psycopg.errors.UndefinedTable:
        return {}
