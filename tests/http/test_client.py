"""Asking relays for their status: whatever comes back is an answer."""

from __future__ import annotations

from mailboat.http.client import ask
from mailboat.http.server import HttpApi, HttpServer
from support.relay_statuses import relay


async def test_each_relay_answers_for_itself_and_one_that_is_away_is_named(relays):
    relays.statuses = [relay()]
    server = HttpServer.bind("127.0.0.1", 0)
    await server.start(HttpApi(lambda: relays.statuses, relays.assign))
    nobody = HttpServer.bind("127.0.0.1", 0)
    nobodys_address = nobody.address
    await nobody.close()
    try:
        there, away = await ask([server.address.removeprefix("http://"), nobodys_address])
    finally:
        await server.close()
    assert [each["name"] for each in there.relays] == ["shop/orders"]
    assert away.relays == ()
    assert "Cannot connect" in (away.error or "")


async def test_something_else_that_listens_there_is_not_taken_for_a_relay(relays):
    server = HttpServer.bind("127.0.0.1", 0)
    await server.start(HttpApi(lambda: relays.statuses, relays.assign))
    try:
        (answer,) = await ask([f"{server.address}/elsewhere/"])
    finally:
        await server.close()
    assert answer.error == "answered 404"


async def test_what_is_no_address_is_told():
    (answer,) = await ask(["http://[::1"])
    assert answer.error == "that is no address: write http://host:port"


async def test_a_relay_that_does_not_answer_is_not_waited_for():
    deaf = HttpServer.bind("127.0.0.1", 0)
    try:
        (answer,) = await ask([deaf.address], timeout=0.2)
    finally:
        await deaf.close()
    assert answer.error is not None
