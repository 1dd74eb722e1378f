"""Story 2: relays inside the application's pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from helm_release import NAMESPACE, Installed
from namespace import PATIENCE, Stage, restarts, staying, wrong_in
from support.wait import wait_until

SIDECAR = "mailboat-relay"
TELL = ("python", "-c", "import os, signal; os.kill(1, signal.SIGUSR1)")
"""Makes whoever trades in a container say how it goes."""


def test_relays_ride_along_and_a_rolling_restart_under_load_loses_nothing(stage: Stage) -> None:
    stage.apply("sidecar-relay", "to-kafka", "application")
    rolled_out(stage, 3)
    stage.until_ready("orders-to-kafka")
    wait_until(lambda: owners(stage), 180, "three sidecars to share the partitions", met=lambda pods: len(pods) == 3)
    for _ in range(2):
        stage.until_written(100)
        stage.kubectl("rollout", "restart", "deployment/application")
        rolled_out(stage, 3)
        stage.until_written(100)
        for report in reports(stage):
            assert report["complaints"] == [], f"the application has complaints (G10): {report}"
            assert report["slowest"] < PATIENCE, f"something held the application up (G10): {report}"
    stage.kubectl("scale", "deployment/application", "--replicas=1")
    stage.kubectl("set", "env", "deployment/application", "PER_SECOND=0.1")
    rolled_out(stage, 1)
    proof = stage.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["written"] > 300, "there was a load all the while"
    assert proof["duplicates"] == 0, "every sidecar that went has handed over in order (G9)"


def test_a_job_with_a_sidecar_completes(stage: Stage) -> None:
    stage.apply("sidecar-relay", "to-kafka", "job")
    stage.kubectl("wait", "job/import", "--for=condition=Complete", "--timeout=120s")
    [pod] = stage.all("pods", "job-name=import")
    assert_sidecar(pod)
    assert wrong_in(stage.audit("orders")) == {}


def test_a_pod_made_while_the_operator_was_away_is_reported(stage: Stage, mailboat: Installed) -> None:
    stage.apply("sidecar-relay")
    with no_operator(mailboat):
        stage.apply("lonely")
        stage.kubectl("wait", "pod/lonely", "--for=condition=Ready", "--timeout=180s")
    condition = wait_until(
        lambda: stage.condition("orders", "SidecarsInjected", "outboxrelay"),
        90,
        "the pod to be reported",
        met=lambda condition: condition.get("status") == "False",
    )
    assert condition["reason"] == "SidecarMissing"
    assert "lonely" in condition["message"]
    # The event comes after the condition.
    events = ("get", "events", "--field-selector=reason=SidecarMissing", "--output=yaml")
    wait_until(lambda: stage.kubectl(*events), 30, "an event about it", met=lambda told: "lonely" in told)


@contextmanager
def no_operator(mailboat: Installed) -> Iterator[None]:
    """Whatever happens in between, the other stories have their operators back."""
    operators, kubectl = "deployment/mailboat-operator", mailboat.cluster.kubectl
    before = len(mailboat.operators())
    kubectl("--namespace", NAMESPACE, "scale", operators, "--replicas=0")
    try:
        wait_until(mailboat.operators, 180, "the operators to be gone", met=lambda pods: not pods)
        yield
    finally:
        kubectl("--namespace", NAMESPACE, "scale", operators, f"--replicas={before}")
        kubectl("--namespace", NAMESPACE, "rollout", "status", operators, "--timeout=120s")


def rolled_out(stage: Stage, replicas: int) -> None:
    """Until the application has so many new pods, each with its sidecar, and none that died by itself."""
    stage.kubectl("rollout", "status", "deployment/application", "--timeout=180s")
    pods = staying(stage.all("pods", "app=application"))
    assert len(pods) == replicas
    for pod in pods:
        assert_sidecar(pod)
        assert restarts(pod) == 0, f"something in {pod['metadata']['name']} crashed"


def reports(stage: Stage) -> list[dict[str, Any]]:
    """What the applications say of their time so far. One with complaints has ended with them, and was restarted."""
    names = [pod["metadata"]["name"] for pod in staying(stage.all("pods", "app=application"))]
    told = [wait_until(partial(_report, stage, name), 180, f"{name} to report") for name in names]
    assert [pod["metadata"]["name"] for pod in stage.all("pods", "app=application") if restarts(pod)] == []
    return told


def _report(stage: Stage, pod: str) -> dict[str, Any]:
    """The last one, once there is one. Whether it has heard the question nobody knows: it is asked again."""
    try_kubectl, where = stage.cluster.commands.try_kubectl, ("--namespace", stage.namespace, pod)
    try_kubectl("exec", *where, "--container=application", "--", *TELL)
    said = try_kubectl("logs", *where, "--container=application").out.splitlines()
    lines = [line for line in said if line.startswith("{")]
    report: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return report


def assert_sidecar(pod: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    policies = {each["name"]: each.get("restartPolicy") for each in pod["spec"].get("initContainers", ())}
    assert policies.get(SIDECAR) == "Always", (
        f"{name} has {policies}: did the webhook not answer the API server in time?"
    )


def owners(stage: Stage) -> set[str]:
    return {each["pod"] for each in stage.status("orders-to-kafka").get("partitions", ()) if each.get("pod")}
