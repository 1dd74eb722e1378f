"""The connection to the API server, before a server that only speaks as much of it as a test needs."""

from __future__ import annotations

import asyncio

import yaml
from aiohttp import web

from mailboat_operator.kube.client import CONFIG_MAP, Kube

MANY = 120
"""Watches: six for each of twenty namespaces, and more than the client's own idea of enough."""


def kubeconfig(place, port):
    file = place / "kubeconfig"
    context = {"name": "it", "context": {"cluster": "it", "user": "it"}}
    document = {
        "current-context": "it",
        "contexts": [context],
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "it", "user": {}}],
    }
    file.write_text(yaml.safe_dump(document))
    return file


async def test_watches_leave_room_for_everything_else_however_many_there_are(tmp_path):
    end = asyncio.Event()
    watched = asyncio.Semaphore(0)

    async def answer(request):
        if "watch" not in request.query:
            return web.json_response({"metadata": {"name": "orders-relay"}})
        response = web.StreamResponse()
        await response.prepare(request)
        watched.release()
        await end.wait()
        return response

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    kube = await Kube.connect(kubeconfig(tmp_path, runner.addresses[0][1]))

    async def watch(namespace):
        async for _ in kube.watch(CONFIG_MAP, namespace, "", "1"):
            pass

    watches = [asyncio.create_task(watch(f"shop-{number}")) for number in range(MANY)]
    try:
        async with asyncio.timeout(60):
            for _ in range(MANY):
                await watched.acquire()
            found = await kube.get(CONFIG_MAP, "shop", "orders-relay")
        assert found["metadata"]["name"] == "orders-relay"
    finally:
        end.set()
        await asyncio.gather(*watches, return_exceptions=True)
        await kube.close()
        await runner.cleanup()
