"""A watch that loses the thread lists again, and gives a server that loses it every time room to breathe."""

from __future__ import annotations

import asyncio

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.watch import Watcher
from mailboat_operator.controller.workqueue import Backoff
from mailboat_operator.kube.client import CONFIG_MAP, Gone, Kube, Listed
from support.wait import await_until


class Forgetful(Kube):
    """An API server that has never kept what happened since the list."""

    def __init__(self) -> None:
        self.lists = 0

    async def list(self, *_, **__):
        self.lists += 1
        await asyncio.sleep(0)
        return Listed((), "7")

    async def watch(self, *_, **__):
        raise Gone("too old resource version")
        yield


async def test_a_server_that_forgets_at_once_is_not_asked_for_lists_without_a_pause():
    kube = Forgetful()
    pauses = []

    def told_of_a_pause() -> float:
        pauses.append(kube.lists)
        return 0.5

    backoff = Backoff(initial=0.001, factor=4.0, random=told_of_a_pause)
    watcher = Watcher(kube, ResourceCache(), CONFIG_MAP, "shop", "", backoff=backoff)
    task = asyncio.create_task(watcher.run())
    await await_until(lambda: kube.lists > 3, what="some lists")
    task.cancel()
    await asyncio.wait([task])
    assert pauses[:3] == [1, 2, 3], "a pause after every list"
