#!/usr/bin/env python3
"""Run the stages of a check in sequence, and print a table at the end: stage, tests, duration, result.

    .ci/stages.py gate      the check of CI; ends at the first failed stage
    .ci/stages.py verify    all tests, also the long ones; runs all stages even if one fails

Every stage is a make target. A test stage that ran no test has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

TEST_STAGES = ("test", "test-api", "e2e")
STAGES = {"gate": ("lint", *TEST_STAGES), "verify": ("lint", *TEST_STAGES, "demo")}


@dataclass(frozen=True)
class Outcome:
    stage: str
    tests: int | None
    """Tests that ran; None if the stage has none."""
    failed: int
    seconds: float
    passed: bool


def run_stage(stage: str, check: str, folder: Path) -> Outcome:
    print(f"\n==> make {stage}", flush=True)
    report = folder / f"{stage}.xml"
    options = f"--junitxml={report} -o junit_family=legacy"  # the legacy format keeps the properties of a test
    environment = os.environ | ({"PYTEST_ADDOPTS": options} if stage in TEST_STAGES else {})
    scope = ["SCOPE=all"] if check == "verify" and stage in TEST_STAGES else []
    began = time.monotonic()
    status = subprocess.run(["make", stage, *scope], env=environment, check=False).returncode
    seconds = time.monotonic() - began
    if stage not in TEST_STAGES:
        return Outcome(stage, None, 0, seconds, status == 0)
    ran, failed = count_tests(report)
    return Outcome(stage, ran, failed, seconds, status == 0 and ran > 0)


def count_tests(report: Path) -> tuple[int, int]:
    """Numbers of run and of failed tests. A missing report counts as no tests."""
    if not report.exists():
        return 0, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [
        {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")} for suite in suites
    ]
    ran = sum(each["tests"] - each["skipped"] for each in counts)
    return ran, sum(each["failures"] + each["errors"] for each in counts)


def print_table(check: str, outcomes: list[Outcome]) -> None:
    print(f"\n==> {check}\n\n{'stage':10} {'tests':>6} {'duration':>9}  result")
    for each in outcomes:
        print(
            f"{each.stage:10} {_tests(each):>6} {_duration(each.seconds):>9}  {'passed' if each.passed else 'FAILED'}"
        )
    for stage in STAGES[check][len(outcomes) :]:
        print(f"{stage:10} {'':>6} {'':>9}  not run")
    tests, failed = sum(each.tests or 0 for each in outcomes), sum(each.failed for each in outcomes)
    print(f"{'total':10} {tests:>6} {_duration(sum(each.seconds for each in outcomes)):>9}\n")
    print(f"{tests - failed} passed, {failed} failed")


def _tests(outcome: Outcome) -> str:
    return "-" if outcome.tests is None else str(outcome.tests)


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main(check: str) -> int:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mailboat-stages-") as folder:
        for stage in STAGES[check]:
            outcomes.append(run_stage(stage, check, Path(folder)))
            if check == "gate" and not outcomes[-1].passed:
                break
    print_table(check, outcomes)
    return 0 if all(each.passed for each in outcomes) and len(outcomes) == len(STAGES[check]) else 1


if __name__ == "__main__":
    if sys.argv[1:] not in (["gate"], ["verify"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
