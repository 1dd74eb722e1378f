"""Assignments over HTTP: authentication, generations, and invalid documents."""

from __future__ import annotations

import io
import json

import pytest

from mailboat.errors import ConfigError, DatabaseUnavailable
from mailboat.http.server import LARGEST, parse_assignment
from support.http_api import OPERATOR

NAME = "shop/orders-to-kafka"


def document(generation=7, **subscriptions):
    return {"generation": generation, "subscriptions": subscriptions or {NAME: {"0": "a", "1": "b"}}}


async def put(client, body, headers=None):
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    if headers is None:
        headers = {"Authorization": f"Bearer {OPERATOR.sign('PUT', '/assignment', data)}"}
    async with client.put("/assignment", data=io.BytesIO(data), headers=headers) as response:
        return response.status, await response.text()


async def test_an_assignment_is_applied(client, relays):
    relays.generations = {NAME: 0}
    status, text = await put(client, document())
    assert (status, json.loads(text)["accepted"]) == (200, [NAME])
    assert relays.assigned == [(NAME, 7, {0: "a", 1: "b"})]


async def test_an_older_generation_is_refused(client, relays):
    relays.generations = {NAME: 8}
    status, text = await put(client, document(generation=7))
    assert (status, json.loads(text)["stale"]) == (409, [NAME])
    assert relays.assigned == []


async def test_an_unknown_subscription_is_named_and_the_others_are_applied(client, relays):
    relays.generations = {NAME: 0}
    status, text = await put(client, document(**{"shop/other": {"0": "a"}, NAME: {"0": "a"}}))
    answer = json.loads(text)
    assert (status, answer["unknown"], answer["accepted"]) == (404, ["shop/other"], [NAME])


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic wrong"}])
async def test_without_a_signature_an_assignment_is_refused(client, relays, header):
    relays.generations = {NAME: 0}
    status, text = await put(client, document(), header)
    assert status == 401
    assert "Authorization: Bearer" in text
    assert relays.assigned == []


async def test_a_relay_without_keys_names_the_missing_option(keyless):
    status, text = await put(keyless, document())
    assert (status, text.strip()) == (
        403,
        "Calls are not accepted: start the relay with --control-keys.",
    )


async def test_a_body_that_is_too_large_is_refused(client):
    assert (await put(client, " " * (LARGEST + 1)))[0] == 413


async def test_an_unavailable_database_is_reported(client, relays):
    relays.failure = DatabaseUnavailable("not connected")
    status, text = await put(client, document())
    assert (status, text.strip()) == (503, "The assignment can't be written down: not connected")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the document"),
        ('{"subscriptions": {}}', "generation"),
        ('{"generation": 0, "subscriptions": {}}', "generation"),
        ('{"generation": true, "subscriptions": {}}', "generation"),
        ('{"generation": 1, "subscriptions": {"a/b": {}}}', "subscriptions.a/b"),
        ('{"generation": 1, "subscriptions": {"a/b": {"x": "r"}}}', "subscriptions.a/b"),
        ('{"generation": 1, "subscriptions": {"a/b": {"256": "r"}}}', "subscriptions.a/b"),
        ('{"generation": 1, "subscriptions": {"a/b": {"0": 1}}}', "subscriptions.a/b.0"),
        ('{"generation": 1, "subscriptions": {}, "extra": 1}', "extra"),
    ],
)
async def test_an_invalid_document_is_refused_with_the_field(client, body, complaint):
    status, text = await put(client, body)
    assert status == 400
    assert complaint in text
    with pytest.raises(ConfigError, match="a file: "):
        parse_assignment(body.encode(), "a file")
