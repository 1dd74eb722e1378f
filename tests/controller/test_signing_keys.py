"""Tokens: their claims, and a rotation of keys in which no call is refused."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from mailboat.http.auth import Unsigned, check_body
from mailboat.http.jwt_auth import JwtVerifier
from mailboat_operator.relays.signing_keys import LINGER, PUBLISH_FOR, RENEW_AFTER, KeyRing, mint, turned

NOW = datetime.now(UTC).replace(microsecond=0)
AUDIENCE = "shop/orders-relay-0/7f9c"


def verified(token: str, public_pem: str, audience: str = AUDIENCE) -> dict[str, object]:
    """Verify a token as a relay does, with any of the public keys."""
    error: Exception = AssertionError("no key at all")
    for pem in re.findall(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", public_pem, re.DOTALL):
        try:
            claims: dict[str, object] = jwt.decode(
                token,
                serialization.load_pem_public_key(pem.encode()),  # type: ignore[arg-type]
                algorithms=["EdDSA"],
                audience=audience,
                issuer="mailboat-operator",
                options={"verify_exp": False, "verify_iat": False},
            )
            return claims
        except jwt.InvalidSignatureError as wrong:
            error = wrong
    raise error


def test_a_token_names_the_pod_the_call_and_the_body_and_lives_for_a_minute() -> None:
    ring = turned(None, NOW)
    claims = verified(mint(ring, AUDIENCE, "PUT", "/config", b"body", NOW), ring.public_pem())
    assert claims == {
        "iss": "mailboat-operator",
        "aud": AUDIENCE,
        "sub": "PUT /config",
        "iat": int(NOW.timestamp()),
        "exp": int(NOW.timestamp()) + 60,
        "sha256": hashlib.sha256(b"body").hexdigest(),
    }


def test_a_relay_refuses_another_audience_and_another_operator() -> None:
    ring = turned(None, NOW)
    token = mint(ring, AUDIENCE, "PUT", "/config", b"", NOW)
    with pytest.raises(jwt.InvalidAudienceError):
        verified(token, ring.public_pem(), "shop/orders-relay-1/aaaa")
    with pytest.raises(jwt.InvalidSignatureError):
        verified(token, turned(None, NOW).public_pem())


def test_the_relay_accepts_tokens_of_the_operator(tmp_path: Path) -> None:
    ring = turned(None, NOW)
    keys = tmp_path / "operator-keys.pem"
    keys.write_text(ring.public_pem())
    calls = JwtVerifier(keys, AUDIENCE)
    token = mint(ring, AUDIENCE, "PUT", "/config", b"body", datetime.now(UTC))
    check_body(calls.check(token, "PUT", "/config"), b"body")
    with pytest.raises(Unsigned):
        calls.check(token, "PUT", "/assignment")
    with pytest.raises(Unsigned):
        calls.check(mint(turned(None, NOW), AUDIENCE, "PUT", "/config", b"body", NOW), "PUT", "/config")
    # During a rotation the file has both keys, and either may sign.
    both = turned(ring, NOW + RENEW_AFTER)
    keys.write_text(both.public_pem())
    for key in both.keys:
        signed = mint(KeyRing((key,)), AUDIENCE, "PUT", "/config", b"body", datetime.now(UTC))
        check_body(JwtVerifier(keys, AUDIENCE).check(signed, "PUT", "/config"), b"body")


def test_the_signing_keys_survive_the_loss_of_the_secret() -> None:
    ring = turned(turned(None, NOW), NOW + RENEW_AFTER)
    again = KeyRing.parse(ring.data())
    assert again is not None
    assert again.public_pem() == ring.public_pem()
    assert again.data() == ring.data()
    assert len(again.keys) == 2


def test_invalid_signing_keys_are_skipped() -> None:
    ring = turned(None, NOW)
    found = KeyRing.parse({**ring.data(), "signing-1.pem": b"garbage", "signing-x.pem": b"", "note": b"hello"})
    assert found is not None
    assert found.data() == ring.data()
    assert KeyRing.parse({"note": b"hello"}) is None


def test_a_new_key_is_published_before_it_signs_and_an_old_one_after_it_signed() -> None:
    old = turned(None, NOW)
    time = NOW + RENEW_AFTER
    both = turned(old, time)
    assert both.public_pem().startswith(old.public_pem())
    assert both.signing_key(time) == old.keys[0]
    time += PUBLISH_FOR
    assert both.signing_key(time) == both.keys[1]
    assert turned(both, time) == both
    time += LINGER
    assert turned(both, time).keys == (both.keys[1],)


@settings(deadline=None)  # on a busy machine the generation of keys takes long
@given(st.lists(st.timedeltas(timedelta(seconds=1), timedelta(days=40)), min_size=1, max_size=12))
def test_a_relay_that_read_the_keys_a_little_ago_takes_every_token(pauses: list[timedelta]) -> None:
    """For any interval between rotations, including long ones without a leader."""
    ring, now = turned(None, NOW), NOW
    seen = [(now, ring.public_pem())]
    for pause in pauses:
        now += pause
        ring = turned(ring, now)
        seen.append((now, ring.public_pem()))
        # The newest keys that every relay had time to read, or else the first ones.
        known = [pem for time, pem in seen if time <= now - PUBLISH_FOR] or [seen[0][1]]
        verified(mint(ring, AUDIENCE, "PUT", "/config", b"", now), known[-1])
        assert 1 <= len(ring.keys) <= 3


def test_private_keys_are_in_no_repr_and_in_no_public_file() -> None:
    ring = turned(None, NOW)
    assert "PRIVATE" not in repr(ring)
    assert "PRIVATE" not in ring.public_pem()
