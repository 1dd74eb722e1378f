"""Properties of the cluster that no story proves."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator

import pytest

from cluster import Cluster
from cluster.from_source import ClusterFromSource
from namespace import STORY, StoryNamespace


@pytest.fixture(scope="module")
def story(cluster: Cluster) -> Iterator[StoryNamespace]:
    name = f"cluster-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, f"{STORY}=cluster")
    yield StoryNamespace(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def test_redis_sets_a_key_once(story: StoryNamespace) -> None:
    story.apply("redis")
    story.kubectl("rollout", "status", "deployment/redis", "--timeout=120s")

    def set_once() -> str:
        return story.kubectl("exec", "deployment/redis", "--", "redis-cli", "set", "event", "done", "NX", "EX", "60")

    assert (set_once().strip(), set_once().strip()) == ("OK", "")


def test_pods_have_no_route_out_of_the_cluster(story: StoryNamespace) -> None:
    if not isinstance(story.cluster, ClusterFromSource):
        pytest.skip("pods of kind have a route: only the node from source has none")
    # An address that is reserved for documentation.
    program = "import socket; s = socket.socket(); s.settimeout(5); print(s.connect_ex(('203.0.113.1', 9)))"
    image = f"--image={story.cluster.images['shop']}"
    story.kubectl("run", "stray", image, "--restart=Never", "--command", "--", "python", "-c", program)
    story.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/stray", "--timeout=180s")
    assert int(story.kubectl("logs", "stray")) == errno.ENETUNREACH
