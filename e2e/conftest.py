"""Fixtures of all stories: a cluster with all images on its node.

A failed test leaves a folder of evidence: resources, events and logs of the whole cluster at that moment.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

from cluster import Cluster
from evidence import collect_evidence
from provider import Provider, pick_provider

EVIDENCE = Path(__file__).parents[1] / "e2e-evidence"
_CLUSTER = pytest.StashKey[Cluster]()
_LAST = pytest.StashKey[BaseException | None]()


def pytest_sessionstart() -> None:
    shutil.rmtree(EVIDENCE, ignore_errors=True)  # of an earlier run
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C: the cluster is removed


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def provider() -> Provider:
    return pick_provider()


@pytest.fixture(scope="session")
def cluster(provider: Provider, pytestconfig: pytest.Config) -> Cluster:
    """The cluster of this run, with all images on its node. It ends with the session."""
    cluster = pytestconfig.stash[_CLUSTER] = provider.start(EVIDENCE / "cluster-that-did-not-start")
    provider.load_images(cluster)
    return cluster


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Close the cluster after all fixtures, since a failed teardown still collects evidence from it."""
    cluster = session.config.stash.get(_CLUSTER, None)
    if cluster is not None:
        cluster.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print recorded properties, and the duration of each story with its fixtures."""
    found = [each for reports in terminalreporter.stats.values() for each in reports]
    reports = [each for each in found if isinstance(each, pytest.TestReport)]
    terminalreporter.section("stories")
    for name, value in (recorded for each in reports if each.when == "call" for recorded in each.user_properties):
        terminalreporter.write_line(f"{name}: {value}")
    took: dict[str, float] = defaultdict(float)
    for each in reports:
        took[each.nodeid.partition("::")[0]] += each.duration
    for story in sorted(took):
        terminalreporter.write_line(f"{took[story]:6.0f} s  {story}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    stash = item.config.stash
    cluster = stash.get(_CLUSTER, None)
    error = call.excinfo.value if call.excinfo is not None else None
    # A failed module fixture raises the same error in each test of the story: collect evidence for the first only.
    if report.failed and cluster is not None and error is not stash.get(_LAST, None):
        stash[_LAST] = error
        name = re.sub(r"\W+", "-", item.nodeid.removeprefix("e2e/").removeprefix("stories/"))
        folder = EVIDENCE / (f"{name}-afterwards" if report.when == "teardown" else name)
        collect_evidence(cluster, folder)
        report.sections.append(("evidence", str(folder)))
    return report
