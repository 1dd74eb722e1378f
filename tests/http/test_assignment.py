"""Assignments over HTTP: authentication, generations, and invalid documents."""

from __future__ import annotations

import io
import json

import pytest

from mailboat.errors import ConfigError, DatabaseUnavailable
from mailboat.http.assignment import LARGEST, parse

NAME = "shop/orders-to-kafka"
TOKEN = {"Authorization": "Bearer correct-horse"}


def document(generation=7, **subscriptions):
    return {"generation": generation, "subscriptions": subscriptions or {NAME: {"0": "a", "1": "b"}}}


async def put(client, body, headers=TOKEN):
    data = io.BytesIO((body if isinstance(body, str) else json.dumps(body)).encode())
    async with client.put("/assignment", data=data, headers=headers) as response:
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


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic correct-horse"}])
async def test_without_the_token_an_assignment_is_refused(client, relays, header):
    relays.generations = {NAME: 0}
    status, text = await put(client, document(), header)
    assert status == 401
    assert "Authorization: Bearer" in text
    assert "correct-horse" not in text
    assert relays.assigned == []


async def test_a_rotated_token_is_valid_at_once(client, relays, token_file):
    relays.generations = {NAME: 0}
    token_file.write_text("battery-staple")
    assert (await put(client, document()))[0] == 401
    assert (await put(client, document(), {"Authorization": "Bearer battery-staple"}))[0] == 200


@pytest.mark.parametrize("content", ["", "\n"])
async def test_an_empty_token_is_refused(client, token_file, content):
    token_file.write_text(content)
    status, text = await put(client, document(), {"Authorization": "Bearer "})
    assert (status, "empty" in text) == (403, True)


async def test_a_missing_token_file_refuses_all_calls(client, token_file):
    token_file.unlink()
    assert (await put(client, document()))[0] == 403


async def test_a_relay_without_a_token_names_the_missing_option(tokenless):
    status, text = await put(tokenless, document())
    assert (status, text.strip()) == (
        403,
        "Orders are not taken here: start the relay with --control-token-file or --control-keys.",
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
        parse(body.encode(), "a file")
