"""Signed calls: the token is valid for one signer, relay, path and body, and for one minute."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from mailboat.errors import ConfigError
from mailboat.http.auth import CallerAuth
from mailboat.http.jwt_auth import JwtVerifier, parse_keys
from support.cli import Operator
from support.http_api import Relays, serving

AUDIENCE = "shop/relay-0/pod-uid"
BODY = json.dumps({"generation": 7, "subscriptions": {"shop/orders": {"0": "relay-0"}}}).encode()
LATER = BODY.replace(b"7", b"9")


@pytest.fixture
def operator() -> Operator:
    return Operator(AUDIENCE)


@pytest.fixture
def keys(tmp_path: Path, operator: Operator) -> Path:
    file = tmp_path / "operator-keys.pem"
    file.write_text(operator.public_keys)
    return file


@pytest.fixture
async def client(relays: Relays, keys: Path) -> AsyncIterator[aiohttp.ClientSession]:
    relays.generations = {"shop/orders": 0}
    async for session in serving(relays, CallerAuth(JwtVerifier(keys, AUDIENCE))):
        yield session


async def put(client: aiohttp.ClientSession, token: str | None, body: bytes = BODY) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with client.put("/assignment", data=body, headers=headers) as response:
        return response.status, await response.text()


def signed(operator: Operator, **claims: Any) -> str:
    return operator.sign("PUT", "/assignment", BODY, **claims)


def signed_later(operator: Operator) -> str:
    return operator.sign("PUT", "/assignment", LATER)


async def test_a_call_signed_by_the_operator_is_accepted(client, operator, relays):
    assert (await put(client, signed(operator)))[0] == 200
    assert relays.assigned == [("shop/orders", 7, {0: "relay-0"})]


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": -31, "iat": -91}, "it has expired"),
        ({"iat": +3600, "exp": +7200}, "it is of the future"),
        ({"aud": "shop/relay-1/pod-uid"}, "it is for another relay"),
        ({"aud": [AUDIENCE, "shop/relay-1/pod-uid"]}, "it is for another relay"),
        ({"iss": "another-issuer"}, "it is not from mailboat-operator"),
        ({"sub": "PUT /config"}, "it was signed for another call"),
        ({"sub": "GET /assignment"}, "it was signed for another call"),
        ({"sha256": hashlib.sha256(b"another").hexdigest()}, "it was signed for another body"),
        ({"sha256": 7}, "sha256 is not a text"),
        *(({name: None}, f"it says nothing about {name}") for name in ("iss", "aud", "iat", "exp", "sub", "sha256")),
    ],
)
async def test_an_invalid_claim_is_named_and_the_token_is_not_repeated(client, operator, relays, claims, reason):
    now = int(time.time())  # not at collection, which may be minutes earlier
    seconds = {name: now + claims[name] for name in ("iat", "exp") if claims.get(name) is not None}
    token = signed(operator, **claims | seconds)
    status, text = await put(client, token)
    assert (status, reason in text) == (401, True), text
    assert not any(part in text for part in token.split("."))
    assert relays.assigned == []


async def test_a_small_clock_skew_is_accepted(client, operator):
    now = int(time.time())
    assert (await put(client, signed(operator, iat=now + 15, exp=now + 75)))[0] == 200
    late = operator.sign("PUT", "/assignment", LATER, iat=now - 75, exp=now - 15)
    assert (await put(client, late, LATER))[0] == 200


async def test_another_key_or_another_body_is_refused(client, operator, relays):
    status, text = await put(client, signed(Operator(AUDIENCE)))
    assert (status, "none of the operator's keys has signed it" in text) == (401, True)
    assert (await put(client, signed(operator), BODY.replace(b"7", b"8")))[0] == 401
    assert relays.assigned == []


def _part(document: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).rstrip(b"=").decode()


def _forged(claims: str, header: dict[str, Any], secret: bytes | None) -> str:
    """A token that the library refuses to encode."""
    text = f"{_part(header)}.{claims}"
    if secret is None:
        return f"{text}."
    mac = hmac.digest(secret, text.encode(), "sha256")
    return f"{text}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


async def test_other_algorithms_than_eddsa_are_refused(client, operator, keys, relays):
    claims = signed(operator).split(".")[1]
    public = keys.read_bytes()
    for token in (
        _forged(claims, {"alg": "none", "typ": "JWT"}, None),
        _forged(claims, {"alg": "None", "typ": "JWT"}, None),
        _forged(claims, {"alg": "HS256", "typ": "JWT"}, public),
        _forged(claims, {"alg": "HS256", "typ": "JWT"}, public.strip()),
        _forged(claims, {"alg": "EdDSA", "typ": "JWT"}, public),
    ):
        assert (await put(client, token))[0] == 401
    elliptic = jwt.encode(
        jwt.decode(signed(operator), options={"verify_signature": False}),
        generate_private_key(SECP256R1()),
        algorithm="ES256",
    )
    status, text = await put(client, elliptic)
    assert (status, "its algorithm is not EdDSA" in text) == (401, True)
    assert relays.assigned == []


@pytest.mark.parametrize("token", [None, "", "a.b.c", "a.b", "..", "é.x.y"])
async def test_a_malformed_token_is_refused(client, relays, token):
    assert (await put(client, token))[0] == 401
    assert relays.assigned == []


async def test_rotated_keys_are_valid_at_once_and_both_during_the_overlap(client, operator, keys):
    newer = Operator(AUDIENCE)
    assert (await put(client, signed(newer)))[0] == 401
    keys.write_text(operator.public_keys + newer.public_keys)
    assert (await put(client, signed(operator)))[0] == 200
    assert (await put(client, signed_later(newer), LATER))[0] == 200
    keys.write_text(newer.public_keys)
    assert (await put(client, signed(operator)))[0] == 401


async def test_without_keys_all_calls_are_refused(client, operator, keys):
    for content in ("", "nonsense", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"):
        keys.write_text(content)
        status, text = await put(client, signed(operator))
        assert (status, "public keys" in text) == (403, True)
    keys.unlink()
    assert (await put(client, signed(operator)))[0] == 403


def test_other_keys_than_ed25519_are_refused():
    other = generate_private_key(SECP256R1()).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ConfigError, match="a file: public key 1 is not of the kind Ed25519"):
        parse_keys(other, "a file")


async def test_without_follow_a_configuration_is_refused(client, operator):
    token = operator.sign("PUT", "/config", BODY)
    async with client.put("/config", data=BODY, headers={"Authorization": f"Bearer {token}"}) as response:
        assert (response.status, "--follow" in await response.text()) == (403, True)
