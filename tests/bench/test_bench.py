"""The benchmark runs and measures what it says. How fast anything is, no test asks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench/bench.py"


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_the_benchmark_prints_its_tables_and_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick", "--events", "5000"],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    told = done.stdout
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + told
    rows = re.findall(r"^  (?:\((\w)\)|   ) .+? +([\d,]+) +[\d.]+ +\d+$", told, re.MULTILINE)
    assert [name for name, _ in rows] == ["a", "b", "c", "d", "e", "", "", "f", "", "", "", "", "g", ""], told
    assert all(int(rate.replace(",", "")) > 0 for _, rate in rows), told
    assert "messages more than there were events" not in told, "the relay delivered each once"
    assert re.search(r"^  p99 +[\d.]+ ms$", told, re.MULTILINE), told
    assert len(re.findall(r"^  (?:met|NOT MET) ", told, re.MULTILINE)) == 8, told
