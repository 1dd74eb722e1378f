"""Story 2: relays inside the application's pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from helm_release import NAMESPACE, Installed
from namespace import SLOWEST_CHANGE, StoryNamespace, restarts, staying, violations
from support.wait import wait_until

SIDECAR = "mailboat-relay"
PRINT_REPORT = ("python", "-c", "import os, signal; os.kill(1, signal.SIGUSR1)")
"""Makes the writers of a container print their report."""


def test_a_rolling_restart_of_pods_with_sidecars_under_load_loses_nothing(story: StoryNamespace) -> None:
    story.apply("sidecar-relay", "to-kafka", "application")
    rolled_out(story, 3)
    story.until_ready("orders-to-kafka")
    wait_until(lambda: owners(story), 180, "three sidecars to share the partitions", met=lambda pods: len(pods) == 3)
    for _ in range(2):
        story.until_written(100)
        story.kubectl("rollout", "restart", "deployment/application")
        rolled_out(story, 3)
        story.until_written(100)
        for report in reports(story):
            assert report["errors"] == [], f"the application reports errors (G10): {report}"
            assert report["slowest"] < SLOWEST_CHANGE, f"the application was delayed (G10): {report}"
    story.kubectl("scale", "deployment/application", "--replicas=1")
    story.kubectl("set", "env", "deployment/application", "PER_SECOND=0.1")
    rolled_out(story, 1)
    proof = story.audit("orders")
    assert violations(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["written"] > 300, "no load"
    assert proof["duplicates"] == 0, "a sidecar stopped without a release of its partitions (G9)"


def test_a_job_with_a_sidecar_completes(story: StoryNamespace) -> None:
    story.apply("sidecar-relay", "to-kafka", "job")
    story.kubectl("wait", "job/import", "--for=condition=Complete", "--timeout=120s")
    [pod] = story.all("pods", "job-name=import")
    assert_sidecar(pod)
    assert violations(story.audit("orders")) == {}


def test_a_pod_created_without_an_operator_is_reported(story: StoryNamespace, mailboat: Installed) -> None:
    story.apply("sidecar-relay")
    with no_operator(mailboat):
        story.apply("without-sidecar")
        story.kubectl("wait", "pod/without-sidecar", "--for=condition=Ready", "--timeout=180s")
    condition = wait_until(
        lambda: story.condition("orders", "SidecarsInjected", "outboxrelay"),
        90,
        "the pod to be reported",
        met=lambda condition: condition.get("status") == "False",
    )
    assert condition["reason"] == "SidecarMissing"
    assert "without-sidecar" in condition["message"]
    # The operator writes the event after the condition.
    events = ("get", "events", "--field-selector=reason=SidecarMissing", "--output=yaml")
    wait_until(lambda: story.kubectl(*events), 30, "an event", met=lambda text: "without-sidecar" in text)


@contextmanager
def no_operator(mailboat: Installed) -> Iterator[None]:
    """Scale the operator to zero for the block, and back for the other stories."""
    operators, kubectl = "deployment/mailboat-operator", mailboat.cluster.kubectl
    before = len(mailboat.operators())
    kubectl("--namespace", NAMESPACE, "scale", operators, "--replicas=0")
    try:
        wait_until(mailboat.operators, 180, "the operators to be gone", met=lambda pods: not pods)
        yield
    finally:
        kubectl("--namespace", NAMESPACE, "scale", operators, f"--replicas={before}")
        kubectl("--namespace", NAMESPACE, "rollout", "status", operators, "--timeout=120s")


def rolled_out(story: StoryNamespace, replicas: int) -> None:
    """Wait for the rollout; then each pod has its sidecar and no restarts."""
    story.kubectl("rollout", "status", "deployment/application", "--timeout=180s")
    pods = staying(story.all("pods", "app=application"))
    assert len(pods) == replicas
    for pod in pods:
        assert_sidecar(pod)
        assert restarts(pod) == 0, f"something in {pod['metadata']['name']} crashed"


def reports(story: StoryNamespace) -> list[dict[str, Any]]:
    """Reports of the application's pods. An application with errors exits, and its container is restarted."""
    names = [pod["metadata"]["name"] for pod in staying(story.all("pods", "app=application"))]
    found = [wait_until(partial(_report, story, name), 180, f"{name} to report") for name in names]
    assert [pod["metadata"]["name"] for pod in story.all("pods", "app=application") if restarts(pod)] == []
    return found


def _report(story: StoryNamespace, pod: str) -> dict[str, Any]:
    """Request a report and return the last one. A signal may be lost, so the caller repeats the request."""
    try_kubectl, where = story.cluster.commands.try_kubectl, ("--namespace", story.namespace, pod)
    try_kubectl("exec", *where, "--container=application", "--", *PRINT_REPORT)
    log = try_kubectl("logs", *where, "--container=application").out.splitlines()
    lines = [line for line in log if line.startswith("{")]
    report: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return report


def assert_sidecar(pod: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    policies = {each["name"]: each.get("restartPolicy") for each in pod["spec"].get("initContainers", ())}
    assert policies.get(SIDECAR) == "Always", (
        f"{name} has {policies}: did the webhook not answer the API server in time?"
    )


def owners(story: StoryNamespace) -> set[str]:
    return {each["pod"] for each in story.status("orders-to-kafka").get("partitions", ()) if each.get("pod")}
