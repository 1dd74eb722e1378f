"""The benchmark runs and measures what it says. How fast anything is, no test asks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def printed(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH / program), *arguments], capture_output=True, text=True, timeout=860, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    return done.stdout


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_the_benchmark_prints_its_tables_and_loses_nothing() -> None:
    told = printed("bench.py", "--quick", "--events", "5000")
    rows = re.findall(r"^  (?:\((\w)\)|   ) .+? +([\d,]+) +[\d.]+ +\d+$", told, re.MULTILINE)
    assert sorted({name for name, _ in rows} - {"", "j"}) == list("abcdefghi"), told
    assert "(j) FastStream" in told, "measured, or left out with the reason"
    assert all(int(rate.replace(",", "")) > 0 for _, rate in rows), told
    assert "messages more than there were events" not in told, "the relay delivered each once"
    steady = re.findall(r"^ +(\d+) +(\d+) +(\d+) +[\d.]+ +[\d.]+ +[\d,.]+ +[\d,.]+ +[\d,.]+ +\d+$", told, re.MULTILINE)
    assert steady == [("40", "1", "1"), ("100", "2", "1"), ("40", "1", "3")], told
    assert re.search(r"^ +0 +1 +1 +[\d.]+ +[\d.]+ +[\d.]+ +\d+$", told, re.MULTILINE), "the idle relay: " + told
    writers = re.findall(r"^  (.+?) +[\d,]+ +[\d.]+ +\d+ +[\d.]+$", told, re.MULTILINE)
    assert writers[:3] == ["plain table", "outbox, no relay", "mailboat.emit, no relay"], told
    assert re.findall(r"^  (?:met|NOT MET) ", told, re.MULTILINE), told


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_peers_are_measured_beside_the_relay_or_left_out_with_a_reason() -> None:
    told = printed("peers.py", "--quick", "--broker", "kfake")
    rows = re.findall(r"^  (\w.+?) +(\d+) +1 +1 ", told, re.MULTILINE)
    reasons = dict(re.findall(r"^Left out: (.+?): (.+)$", told, re.MULTILINE))
    measured = {"Mailboat", "Debezium, embedded engine", "Debezium Server", "watermill-sql"} - reasons.keys()
    assert sorted(rows) == sorted((name, rate) for name in measured for rate in ("0", "40")), told
