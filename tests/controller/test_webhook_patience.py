"""Limits of a webhook request: most of the API server's timeout, and the memory that one pod needs."""

from __future__ import annotations

import asyncio
import io

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from mailboat_operator.kube.client import Kube
from mailboat_operator.kube.errors import ApiUnavailable, NotFound, Throttled
from mailboat_operator.metrics import Metrics
from mailboat_operator.resources.pod import RelayImage
from mailboat_operator.webhook import server
from mailboat_operator.webhook.injection import Outcome
from mailboat_operator.webhook.server import PATH, Webhook, answer_timeout
from support.wait import await_until


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("10s", 6.0), ("30s", 18.0), ("99s", 18.0), (None, 3.0), ("", 3.0), ("1m0s", 3.0), ("999s", 3.0), ("-5s", 3.0)],
)
def test_the_webhook_takes_three_fifths_of_the_given_time(given, seconds):
    assert answer_timeout(given) == pytest.approx(seconds)


class SilentKube(Kube):
    """An API server that responds only after ``answers`` is set. One test sets it."""

    def __init__(self):
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def server_version(self):
        self.asked.set()
        await self.answers.wait()
        return 1, 20


POD = {"metadata": {"labels": {"mailboat.dev/relay": "orders"}}, "spec": {"containers": []}}
REQUEST = {"uid": "1", "operation": "CREATE", "namespace": "shop", "object": POD}


class ShakyKube(Kube):
    """An API server that fails twice and then responds that the relay does not exist."""

    def __init__(self):
        self.asked = 0

    async def server_version(self):
        return 1, 34

    async def get(self, kind, namespace, name):
        self.asked += 1
        raise [ApiUnavailable("broke off"), Throttled("not now"), NotFound("no such relay")][self.asked - 1]


async def test_a_moment_without_an_api_server_costs_no_pod_its_answer():
    kube = ShakyKube()
    hook = Webhook(kube, RelayImage("relay:1"), Metrics(CollectorRegistry()))
    answer = await hook.answer(REQUEST, within=60)
    assert (answer.outcome, kube.asked) == (Outcome.LEFT_OUT, 3)
    assert 'no OutboxRelay "orders"' in answer.warnings[0]


async def test_a_pod_is_let_through_before_the_api_server_gives_up_on_the_webhook():
    hook = Webhook(SilentKube(), RelayImage("relay:1"), Metrics(CollectorRegistry()))
    review = {"request": REQUEST}
    async with TestClient(TestServer(hook.application())) as client, asyncio.timeout(60):
        answer = await client.post(f"{PATH}?timeout=1s", json=review)
        response = (await answer.json())["response"]
    assert response["allowed"] is True
    assert "patch" not in response
    assert "did not answer in time" in response["warnings"][0]


async def in_pieces():
    for _ in range(40):
        yield bytes(64 * 1024)


@pytest.mark.parametrize("body", [io.BytesIO(bytes(2_500_000)), in_pieces()], ids=["by its length", "while it is read"])
async def test_a_review_larger_than_that_of_any_pod_is_refused(body):
    hook = Webhook(SilentKube(), RelayImage("relay:1"), Metrics(CollectorRegistry()))
    async with TestClient(TestServer(hook.application())) as client, asyncio.timeout(60):
        assert (await client.post(PATH, data=body)).status == 413


async def test_reviews_wait_for_memory_and_too_many_of_them_are_refused(monkeypatch):
    monkeypatch.setattr(server, "_MEMORY", server._LEAST)
    monkeypatch.setattr(server, "_MAX_WAITERS", 1)
    kube = SilentKube()
    hook = Webhook(kube, RelayImage("relay:1"), Metrics(CollectorRegistry()))
    async with TestClient(TestServer(hook.application())) as client, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post(f"{PATH}?timeout=30s", json={"request": REQUEST}))
        await kube.asked.wait()
        waits = tasks.create_task(client.post(f"{PATH}?timeout=30s", json={"request": REQUEST}))
        await await_until(lambda: hook._memory._waiters == 1, what="the second one to wait")
        assert (await client.post(PATH, json={"request": REQUEST})).status == 503
        assert not any(each.done() for each in (first, waits))
        kube.answers.set()
    assert [each.result().status for each in (first, waits)] == [200, 200]
