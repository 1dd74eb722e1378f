"""Fixtures for tests on a real Kubernetes API server. All tests in this folder are marked ``api``.

- ``api`` is a bare server without controllers, so objects stay as a test creates them. Pods are accepted without a
  service account. A deleted namespace is never removed.
- ``api_with_controllers`` runs Kubernetes' own controllers: Deployments get pods, orphans are collected.

Both servers serve the Mailboat kinds and record all requests (``requests``). Both are shared: each test has its own
namespace. A test that kills the server or counts all objects starts a separate one (``start_api_server``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from mailboat_devservers.kubernetes import ApiServer, start_api_server
from mailboat_operator.kube.client import Kube
from support.crd_definitions import until_established, until_served
from support.operator_under_test import Cluster
from support.wait import wait_until

CRDS = Path(__file__).parents[2] / "crds"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.api)


def with_our_kinds(server: ApiServer) -> ApiServer:
    """Apply ``crds/*.yaml`` and return the server when the kinds are served."""
    files = sorted(CRDS.glob("*.yaml"))
    assert files, f"there are no custom resource definitions in {CRDS}"
    for file in files:
        server.kubectl("apply", "--server-side", "--filename", str(file))
    until_established(server, "crd", "--all")
    until_served(server)
    return server


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory, or_skip: Callable[..., ApiServer]) -> Iterator[ApiServer]:
    """A bare API server. Shared: to kill a server, start a separate one."""
    place = tmp_path_factory.mktemp("api")
    with or_skip(lambda: start_api_server(place, audit=True)) as server:
        yield with_our_kinds(server)


@pytest.fixture(scope="session")
def api_with_controllers(
    tmp_path_factory: pytest.TempPathFactory, or_skip: Callable[..., ApiServer]
) -> Iterator[ApiServer]:
    """An API server with Kubernetes' own controllers. Shared like ``api``."""
    place = tmp_path_factory.mktemp("api-with-controllers")
    with or_skip(lambda: start_api_server(place, controllers=True, audit=True)) as server:
        yield with_our_kinds(server)


@pytest.fixture
def namespace(api: ApiServer, unique_name: Callable[[str], str]) -> str:
    """A fresh namespace on ``api``."""
    name = unique_name("test")
    api.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def controlled_namespace(api_with_controllers: ApiServer, unique_name: Callable[[str], str]) -> Iterator[str]:
    """A fresh namespace on ``api_with_controllers``, with its default service account."""
    name = unique_name("test")
    api_with_controllers.kubectl("create", "namespace", name)
    account = ("get", "serviceaccount", "default", "--namespace", name)
    wait_until(lambda: api_with_controllers.try_kubectl(*account).status == 0, what="the default service account")
    yield name
    api_with_controllers.kubectl("delete", "namespace", name, "--wait=false")


@pytest_asyncio.fixture
async def cluster(api: ApiServer, namespace: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Administrator access to the fresh namespace, for tests that run the operator's controller in process."""
    kube = await Kube.connect(api.kubeconfig)
    cluster = Cluster(api, kube, namespace, tmp_path)
    yield cluster
    await cluster.close()
    await kube.close()


@pytest_asyncio.fixture
async def orders(cluster: Cluster) -> None:
    """The OutboxRelay ``orders`` with the subscription ``orders-to-kafka``."""
    await cluster.create_relay()
    await cluster.create_subscription()
