"""What the stories share: one Mailboat on the cluster, and a stage for each of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from cluster import Cluster
from helm_release import Installed
from inventory import Object, inventory
from namespace import KAFKA, PASSWORD, STORY, Stage
from readme import topics


@pytest.fixture(scope="session")
def pristine(cluster: Cluster) -> set[Object]:
    """All that the cluster held before anything of Mailboat came to it."""
    return inventory(cluster)


@pytest.fixture(scope="module")
def mailboat(cluster: Cluster, pristine: set[Object]) -> Installed:
    """The chart, installed by the first story and left to the next; it goes with the cluster."""
    installed = Installed(cluster)
    installed.ensure()
    return installed


@pytest.fixture(scope="module")
def stage(cluster: Cluster, mailboat: Installed, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A namespace of the story's own with Postgres, Kafka and the shop, all ready, and nothing of Mailboat."""
    story = request.module.__name__.rpartition("test_")[2].replace("_", "-")
    name = f"{story}-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, f"{STORY}={story}")
    stage = Stage(cluster, name)
    try:
        stage.apply("database", "kafka", "shop")
        for workload in ("statefulset/postgres", "statefulset/kafka", "deployment/shop"):
            stage.kubectl("rollout", "status", workload, "--timeout=180s")
        stage.in_postgres(f"create role shop login createrole password '{PASSWORD}'")
        stage.in_postgres("create database shop owner shop")
        # As the README makes them, but for what is too large for one of them.
        limits = {"orders": ":40000"}
        made = [f"{topic}:{partitions}{limits.get(topic, '')}" for topic, partitions in topics().items()]
        stage.prepare("--kafka", KAFKA, *(word for each in made for word in ("--topic", each)))
        yield stage
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
