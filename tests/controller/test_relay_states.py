"""Calls to relays over real sockets: relays of one resource must not delay other relays or exhaust the operator."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.http_client import RelayClient
from mailboat_operator.relays.pods import RelayPod, relay_pod
from mailboat_operator.relays.reports import PollTimeouts
from mailboat_operator.relays.signing_keys import Signer, turned
from mailboat_operator.relays.state import RelayStates
from mailboat_operator.resources.pod import CONTAINER, PORT, relay_labels
from support.wait import await_until


def pod(relay: str, number: int, ip: str) -> RelayPod:
    name = f"{relay}-relay-{number}"
    metadata = {"name": name, "namespace": "shop", "uid": f"u-{name}", "labels": relay_labels(relay)}
    return relay_pod({"metadata": metadata, "spec": {"containers": [{"name": CONTAINER}]}, "status": {"podIP": ip}})


# The port of a relay is fixed, so every test process has its own addresses.
SIGNER = Signer(turned(None, datetime.now(UTC)))
_HOST = f"{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
ANSWERS, SILENT = f"127.5.{_HOST}", f"127.6.{_HOST}"


class Pods:
    """One endpoint that returns a status, and one that never responds."""

    def __init__(self) -> None:
        self.silent = 0
        self._ended = asyncio.Event()
        self.status: dict[str, object] = {"relays": []}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pods]:
        application = web.Application()
        application.router.add_get("/status", self._status)
        runner = web.AppRunner(application, access_log=None, handle_signals=False)
        await runner.setup()
        for ip in (ANSWERS, SILENT):
            await web.TCPSite(runner, ip, PORT, reuse_address=True).start()
        try:
            yield self
        finally:
            self._ended.set()
            await runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        if request.host.startswith(SILENT):
            self.silent += 1
            await self._ended.wait()
        return web.Response(text=json.dumps(self.status))


@asynccontextmanager
async def relays(timeouts: PollTimeouts) -> AsyncIterator[tuple[RelayStates, Pods]]:
    async with RelayClient(SIGNER, timeout=300) as client, Pods().running() as pods:
        yield RelayStates(client, Metrics(CollectorRegistry()), timeouts), pods


async def test_pods_that_do_not_answer_keep_no_relay_of_another_resource_waiting():
    async with relays(PollTimeouts(poll=300)) as (states, pods), asyncio.timeout(60):
        silent = [pod("big", number, SILENT) for number in range(320)]
        hangs = asyncio.create_task(states.poll(("shop", "big"), silent, {}))
        await await_until(lambda: pods.silent >= 8, what="all calls that one resource may have")
        (answer,) = await states.poll(("shop", "small"), [pod("small", 0, ANSWERS)], {})
        assert answer.report is not None
        hangs.cancel()
        await asyncio.gather(hangs, return_exceptions=True)


async def test_silent_pods_are_polled_last_and_in_turn():
    async with relays(PollTimeouts(poll=0.2)) as (states, _), asyncio.timeout(60):
        silent = [pod("big", number, SILENT) for number in range(20)]
        good = pod("big", 99, ANSWERS)
        called: set[str] = set()
        answered = False
        while len(called) < 21 or not answered:  # 8 calls at a time; the other pods follow in later polls
            *_, answer = await states.poll(("shop", "big"), [*silent, good], {})
            called |= states._relays["shop", "big"].poll.called.keys()
            answered = answer.report is not None


@pytest.mark.parametrize("excess", [0, 200_000])
async def test_an_answer_that_is_longer_than_a_status_can_be_is_none(excess):
    async with relays(PollTimeouts()) as (states, pods), asyncio.timeout(60):
        pods.status = {"relays": [], "ballast": "x" * excess}
        (answer,) = await states.poll(("shop", "small"), [pod("small", 0, ANSWERS)], {"shop/out": 8})
        assert (answer.report is None, "more than a status can have" in answer.error) == (excess > 0, excess > 0)
