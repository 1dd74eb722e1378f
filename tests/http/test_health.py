"""The liveness probe fails only if a restart helps."""

from __future__ import annotations

import asyncio
import errno
import socket

import aiohttp
import pytest

from mailboat.errors import ConfigError
from mailboat.http.server import HttpServer, parse_address
from mailboat.runtime.relay_status import RelayState
from support.relay_statuses import relay, subscription
from support.wait import await_until


async def get(client: aiohttp.ClientSession, path: str) -> tuple[int, str]:
    async with client.get(path) as response:
        return response.status, (await response.text()).strip()


async def test_a_running_relay_is_live_and_ready(client, relays):
    relays.statuses = [relay()]
    assert await get(client, "/livez") == (200, "ok")
    assert await get(client, "/readyz") == (200, "ok")


async def test_a_relay_whose_event_loop_is_stalled_is_not_live(client, relays):
    relays.statuses = [relay(), relay(name="shop/returns", stalled=True)]
    assert await get(client, "/livez") == (503, "stalled: shop/returns")


@pytest.mark.parametrize("state", [RelayState.CONNECTING, RelayState.FAILED, RelayState.STOPPING])
async def test_an_unavailable_database_or_sink_does_not_fail_the_liveness_probe(client, relays, state):
    away = subscription(sink_reachable=False, last_error="no broker")
    relays.statuses = [relay(state=state, database_reachable=False, subscriptions=(away,))]
    assert await get(client, "/livez") == (200, "ok")


async def test_readiness_requires_that_every_relay_was_connected_once(client, relays):
    waiting = relay(name="shop/returns", state=RelayState.CONNECTING, message="no connection", was_connected=False)
    relays.statuses = [relay(), waiting]
    assert await get(client, "/readyz") == (503, "shop/returns: Connecting: no connection")
    relays.statuses = [relay(), relay(name="shop/returns")]
    assert await get(client, "/readyz") == (200, "ok")


async def test_a_relay_that_was_ready_stays_ready_during_an_outage(client, relays):
    """Even if the probe did not run while the relay was connected."""
    relays.statuses = [relay(state=RelayState.CONNECTING, database_reachable=False)]
    assert await get(client, "/readyz") == (200, "ok")


async def test_a_stopping_relay_is_not_ready(client, relays):
    relays.statuses = [relay()]
    relays.stopping = True
    assert await get(client, "/readyz") == (503, "stopping")


async def test_the_status_has_camel_case_fields(client, relays):
    relays.statuses = [relay()]
    async with client.get("/status") as response:
        assert response.content_type == "application/json"
        (status,) = (await response.json())["relays"]
    assert status["name"] == "shop/orders"
    assert status["partitionsAheadDays"] == 29.5
    assert status["subscriptions"][0]["oldestAge"] == 1.5
    assert [each["partition"] for each in status["subscriptions"][0]["owned"]] == [0, 1]
    assert status["subscriptions"][0]["owners"] == {"0": "a", "1": "a", "2": "b", "3": "b"}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        (":0", ("127.0.0.1", 0)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:9", ("::1", 9)),
        ("[::]:9", ("::", 9)),
    ],
)
def test_an_address_is_parsed(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["8080", "host:", "host:http", "host:70000", "host:-1", ""])
def test_an_invalid_address_is_refused(text):
    with pytest.raises(ConfigError, match="write host:port"):
        parse_address(text)


def reaches(family, host, port):
    try:
        with socket.socket(family) as connection:
            connection.connect((host, port))
            return True
    except OSError:
        return False


@pytest.mark.parametrize("kernel", ["with IPv6", "without IPv6", "with IPv6 disabled"])
async def test_the_wildcard_address_accepts_ipv4_and_if_available_ipv6(kernel, monkeypatch):
    if kernel == "without IPv6":
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    elif kernel == "with IPv6 disabled":
        create = socket.create_server

        def refusing(address, **options):
            if address[0] == "::":
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            return create(address, **options)

        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
        monkeypatch.setattr(socket, "create_server", refusing)
    server = HttpServer("::", 0, "2001:db8::7")
    try:
        assert server.address.startswith("http://[2001:db8::7]:"), "the advertised address"
        port = int(server.address.rpartition(":")[2])
        assert reaches(socket.AF_INET, "127.0.0.1", port)
        if kernel == "with IPv6" and socket.has_dualstack_ipv6():
            assert reaches(socket.AF_INET6, "::1", port)
    finally:
        await server.close()


async def test_connections_of_one_peer_are_limited(client):
    host, port = client._base_url.host, client._base_url.port
    idle = []
    for _ in range(100):
        idle.append(await asyncio.open_connection(host, port))
    closed = asyncio.gather(*(reader.read() for reader, _ in idle[40:]))
    async with asyncio.timeout(60):
        assert await closed == [b""] * 60, "connections beyond the limit are open"
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as other:
        assert (await other.get(f"http://{host}:{port}/livez")).status == 200
    for _, writer in idle:
        writer.close()
    await await_until(lambda: reaches_livez(client), what="a free connection")


async def reaches_livez(client):
    try:
        return (await client.get("/livez")).status == 200
    except aiohttp.ClientError:
        return False


async def test_an_address_in_use_is_refused_with_a_remedy():
    first = HttpServer("127.0.0.1", 0)
    port = int(first.address.rpartition(":")[2])
    try:
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}: .*--listen"):
            HttpServer("127.0.0.1", port)
    finally:
        await first.close()
