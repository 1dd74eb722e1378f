"""The cluster runs pods, resolves the names of services, and restarts killed containers."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator

import pytest

from cluster import Cluster
from cluster.from_source import ClusterFromSource
from namespace import STORY, StoryNamespace
from support.wait import wait_until


@pytest.fixture(scope="module")
def story(cluster: Cluster) -> Iterator[StoryNamespace]:
    name = f"cluster-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, f"{STORY}=cluster")
    yield StoryNamespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def pubsub(story: StoryNamespace) -> StoryNamespace:
    story.apply("pubsub")
    story.kubectl("rollout", "status", "deployment/pubsub", "--timeout=120s")
    return story


def the_pod(story: StoryNamespace) -> dict[str, object]:
    [pod] = story.all("pods", "app=pubsub")
    return pod


def test_a_pod_reaches_another_by_the_name_of_its_service(pubsub: StoryNamespace) -> None:
    program = "import socket; socket.create_connection(('pubsub', 8085), 10).close(); print('connected')"
    image = f"--image={pubsub.cluster.images['shop']}"
    # OnFailure, since the endpoints of a Service are updated shortly after a pod is ready.
    pubsub.kubectl("run", "caller", image, "--restart=OnFailure", "--command", "--", "python", "-c", program)
    pubsub.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/caller", "--timeout=180s")
    assert pubsub.kubectl("logs", "caller") == "connected\n"


def test_redis_sets_a_key_once(story: StoryNamespace) -> None:
    story.apply("redis")
    story.kubectl("rollout", "status", "deployment/redis", "--timeout=120s")

    def set_once() -> str:
        return story.kubectl("exec", "deployment/redis", "--", "redis-cli", "set", "event", "done", "NX", "EX", "60")

    assert (set_once().strip(), set_once().strip()) == ("OK", "")


def test_a_killed_container_is_started_again(pubsub: StoryNamespace) -> None:
    def restarts() -> int:
        return int(pubsub.kubectl("get", "pods", "--selector=app=pubsub", f"--output={_RESTARTS}"))

    before = restarts()
    pubsub.kill(the_pod(pubsub), "pubsub")
    wait_until(lambda: restarts() > before, 180, "the container to be started again")
    pubsub.kubectl("wait", "--for=condition=Ready", "pod", "--selector=app=pubsub", "--timeout=180s")


def test_a_killed_api_server_restarts_with_its_objects(pubsub: StoryNamespace) -> None:
    pubsub.cluster.kill_api_server()
    pubsub.cluster.until_api_answers()
    assert the_pod(pubsub)["kind"] == "Pod"


def test_pods_have_no_route_out_of_the_cluster(pubsub: StoryNamespace) -> None:
    if not isinstance(pubsub.cluster, ClusterFromSource):
        pytest.skip("pods of kind have a route: only the node from source has none")
    # An address that is reserved for documentation.
    program = "import socket; s = socket.socket(); s.settimeout(5); print(s.connect_ex(('203.0.113.1', 9)))"
    image = f"--image={pubsub.cluster.images['shop']}"
    pubsub.kubectl("run", "stray", image, "--restart=Never", "--command", "--", "python", "-c", program)
    pubsub.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/stray", "--timeout=180s")
    assert int(pubsub.kubectl("logs", "stray")) == errno.ENETUNREACH


_RESTARTS = "jsonpath={.items[0].status.containerStatuses[0].restartCount}"
