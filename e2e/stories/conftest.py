"""Fixtures of the stories: one release of the chart on the cluster, and a namespace for each story."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from cluster import Cluster
from helm_release import Installed
from inventory import Object, inventory
from namespace import KAFKA, PASSWORD, STORY, StoryNamespace
from readme import topics


@pytest.fixture(scope="session")
def pristine(cluster: Cluster) -> set[Object]:
    """All objects of the cluster before the first install of the chart."""
    return inventory(cluster)


@pytest.fixture(scope="module")
def mailboat(cluster: Cluster, pristine: set[Object]) -> Installed:
    """The release of the chart, installed by the first story and shared by the others."""
    installed = Installed(cluster)
    installed.ensure()
    return installed


@pytest.fixture(scope="module")
def story(cluster: Cluster, mailboat: Installed, request: pytest.FixtureRequest) -> Iterator[StoryNamespace]:
    """The namespace of a story with Postgres, Kafka and the shop, all ready, and no resources of Mailboat."""
    label = request.module.__name__.rpartition("test_")[2].replace("_", "-")
    name = f"{label}-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, f"{STORY}={label}")
    story = StoryNamespace(cluster, name)
    try:
        story.apply("database", "kafka", "shop")
        for workload in ("statefulset/postgres", "statefulset/kafka", "deployment/shop"):
            story.kubectl("rollout", "status", workload, "--timeout=180s")
        story.in_postgres(f"create role shop login createrole password '{PASSWORD}'")
        story.in_postgres("create database shop owner shop")
        # The topics of the README, one of them with a size limit.
        limits = {"orders": ":40000"}
        specs = [f"{topic}:{partitions}{limits.get(topic, '')}" for topic, partitions in topics().items()]
        story.prepare("--kafka", KAFKA, *(word for each in specs for word in ("--topic", each)))
        yield story
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
