"""The rules of tests/conftest.py, checked with small test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def run(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini(f"""
        [pytest]
        asyncio_mode = auto
        asyncio_default_fixture_loop_scope = function
        filterwarnings = error
        pythonpath = {CONFTEST.parent}
    """)
    return pytester


def test_a_task_left_behind_fails_the_test(run: pytest.Pytester) -> None:
    run.makepyfile("""
        import asyncio

        async def test_leaves():
            test_leaves.task = asyncio.create_task(asyncio.sleep(600))

        async def test_clears_up():
            task = asyncio.create_task(asyncio.sleep(600))
            task.cancel()
    """)
    result = run.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*the test left tasks behind*"])


MISSING_PART = """
    from mailboat_devservers.errors import PartMissing

    def test_needs_it(or_skip):
        def start():
            raise PartMissing("there is no mvn on the PATH: install Maven")
        or_skip(start)
"""


def test_a_missing_part_is_skipped_and_named_at_the_end(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    run.makepyfile(MISSING_PART)
    result = run.runpytest_subprocess("-n", "1")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["*real parts that were missing*", "1 test did not run: there is no mvn on the PATH: install Maven"]
    )


def test_a_missing_part_fails_in_ci(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    run.makepyfile(MISSING_PART)
    result = run.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a real part is missing: there is no mvn on the PATH*"])
