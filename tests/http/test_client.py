"""The client for the status of relays: every outcome is a result, never an exception."""

from __future__ import annotations

from mailboat.http.client import fetch_statuses
from mailboat.http.server import HttpApi, HttpServer
from support.relay_statuses import relay


async def test_an_unreachable_relay_has_an_error_and_the_others_their_status(relays):
    relays.statuses = [relay()]
    server = HttpServer("127.0.0.1", 0)
    await server.start(HttpApi(relays.status, relays.assign).routes())
    closed = HttpServer("127.0.0.1", 0)
    closed_address = closed.address
    await closed.close()
    try:
        reached, unreachable = await fetch_statuses([server.address.removeprefix("http://"), closed_address])
    finally:
        await server.close()
    assert [each["name"] for each in reached.relays] == ["shop/orders"]
    assert unreachable.relays == ()
    assert "Cannot connect" in (unreachable.error or "")


async def test_another_http_server_is_not_taken_for_a_relay(relays):
    server = HttpServer("127.0.0.1", 0)
    await server.start(HttpApi(relays.status, relays.assign).routes())
    try:
        (response,) = await fetch_statuses([f"{server.address}/elsewhere/"])
    finally:
        await server.close()
    assert response.error == "answered 404"


async def test_an_invalid_address_is_reported():
    (response,) = await fetch_statuses(["http://[::1"])
    assert response.error == "that is no address: write http://host:port"


async def test_a_relay_that_accepts_and_never_answers_times_out():
    silent = HttpServer("127.0.0.1", 0)
    try:
        (response,) = await fetch_statuses([silent.address], timeout=0.2)
    finally:
        await silent.close()
    assert response.error is not None
