"""The cluster is a real one: pods run, find each other by name, and come back when they are killed."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator

import pytest

from cluster import Cluster
from cluster.from_source import ClusterFromSource
from namespace import STORY, Stage
from support.wait import wait_until


@pytest.fixture(scope="module")
def stage(cluster: Cluster) -> Iterator[Stage]:
    name = f"cluster-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, f"{STORY}=cluster")
    yield Stage(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def pubsub(stage: Stage) -> Stage:
    stage.apply("pubsub")
    stage.kubectl("rollout", "status", "deployment/pubsub", "--timeout=120s")
    return stage


def the_pod(stage: Stage) -> dict[str, object]:
    [pod] = stage.all("pods", "app=pubsub")
    return pod


def test_a_pod_reaches_another_by_the_name_of_its_service(pubsub: Stage) -> None:
    program = "import socket; socket.create_connection(('pubsub', 8085), 10).close(); print('connected')"
    image = f"--image={pubsub.cluster.images['shop']}"
    # Again where it fails: a Service learns of its pods a moment after they are ready.
    pubsub.kubectl("run", "caller", image, "--restart=OnFailure", "--command", "--", "python", "-c", program)
    pubsub.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/caller", "--timeout=180s")
    assert pubsub.kubectl("logs", "caller") == "connected\n"


def test_redis_sets_a_key_once(stage: Stage) -> None:
    stage.apply("redis")
    stage.kubectl("rollout", "status", "deployment/redis", "--timeout=120s")

    def set_once() -> str:
        return stage.kubectl("exec", "deployment/redis", "--", "redis-cli", "set", "event", "done", "NX", "EX", "60")

    assert (set_once().strip(), set_once().strip()) == ("OK", "")


def test_a_killed_container_is_started_again(pubsub: Stage) -> None:
    def restarts() -> int:
        return int(pubsub.kubectl("get", "pods", "--selector=app=pubsub", f"--output={_RESTARTS}"))

    before = restarts()
    pubsub.kill(the_pod(pubsub), "pubsub")
    wait_until(lambda: restarts() > before, 180, "the container to be started again")
    pubsub.kubectl("wait", "--for=condition=Ready", "pod", "--selector=app=pubsub", "--timeout=180s")


def test_a_killed_api_server_comes_back_with_all_it_knew(pubsub: Stage) -> None:
    pubsub.cluster.kill_api_server()
    pubsub.cluster.until_api_answers()
    assert the_pod(pubsub)["kind"] == "Pod"


def test_nothing_leaves_the_cluster_that_a_story_might_send(pubsub: Stage) -> None:
    if not isinstance(pubsub.cluster, ClusterFromSource):
        pytest.skip("kind lets its pods out: only the node from source has no route")
    # An address that is reserved for documentation: nobody has it, and here there is no way to it either.
    program = "import socket; s = socket.socket(); s.settimeout(5); print(s.connect_ex(('203.0.113.1', 9)))"
    image = f"--image={pubsub.cluster.images['shop']}"
    pubsub.kubectl("run", "stray", image, "--restart=Never", "--command", "--", "python", "-c", program)
    pubsub.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/stray", "--timeout=180s")
    assert int(pubsub.kubectl("logs", "stray")) == errno.ENETUNREACH


_RESTARTS = "jsonpath={.items[0].status.containerStatuses[0].restartCount}"
