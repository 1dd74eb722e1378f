"""How long the webhook may take: most of what the API server says that it waits."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from mailboat_operator.injection import Outcome
from mailboat_operator.kube import ApiUnavailable, Kube, NotFound, Throttled
from mailboat_operator.podspec import RelayImage
from mailboat_operator.webhook import PATH, InjectionMetrics, Webhook, time_to_answer


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("10s", 6.0), ("5s", 3.0), ("30s", 18.0), (None, 3.0), ("", 3.0), ("1m0s", 3.0), ("999s", 3.0), ("-5s", 3.0)],
)
def test_it_takes_three_fifths_of_what_it_is_given(given, seconds):
    assert time_to_answer(given) == pytest.approx(seconds)


class SilentKube(Kube):
    """An API server that never answers."""

    def __init__(self):
        """Needs no connection."""

    async def server_version(self):
        await asyncio.Event().wait()


POD = {"metadata": {"labels": {"mailboat.dev/relay": "orders"}}, "spec": {"containers": []}}
REQUEST = {"uid": "1", "operation": "CREATE", "namespace": "shop", "object": POD}


class ShakyKube(Kube):
    """An API server that fails twice before it answers that there is no such relay."""

    def __init__(self):
        self.asked = 0

    async def server_version(self):
        return 1, 34

    async def get(self, kind, namespace, name):
        self.asked += 1
        raise [ApiUnavailable("broke off"), Throttled("not now"), NotFound("no such relay")][self.asked - 1]


async def test_a_moment_without_an_api_server_costs_no_pod_its_answer():
    kube = ShakyKube()
    hook = Webhook(kube, RelayImage("relay:1"), InjectionMetrics(CollectorRegistry()))
    answer = await hook.answer(REQUEST, within=60)
    assert (answer.outcome, kube.asked) == (Outcome.LEFT_OUT, 3)
    assert 'no OutboxRelay "orders"' in answer.warnings[0]


async def test_a_pod_is_let_through_before_the_api_server_gives_up_on_the_webhook():
    hook = Webhook(SilentKube(), RelayImage("relay:1"), InjectionMetrics(CollectorRegistry()))
    review = {"request": REQUEST}
    async with TestClient(TestServer(hook.application())) as client, asyncio.timeout(60):
        answer = await client.post(f"{PATH}?timeout=1s", json=review)
        response = (await answer.json())["response"]
    assert response["allowed"] is True
    assert "patch" not in response
    assert "did not answer in time" in response["warnings"][0]
