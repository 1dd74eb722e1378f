"""Secrets in plain text are detected, and similar names of other settings are accepted."""

from __future__ import annotations

from typing import get_args

import pytest

from mailboat_spec.redaction import contains_password, is_secret_setting, secret_names
from mailboat_spec.references import SecretRef, UsesSecrets
from mailboat_spec.resources.sinks import Sink

SECRETS = [
    "sasl.password", "ssl.key.password", "ssl.keystore.password", "ssl.key.pem", "ssl_key", "sasl.jaas.config",
    "sasl.oauthbearer.client.secret", "sasl.oauthbearer.assertion.private.key.pem", "apiKey", "clientSecret",
    "sasl.oauthbearer.assertion.private.key.passphrase", "Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key",
    "X-Auth-Token", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY",
]  # fmt: skip
OTHERS = [
    "sasl.username", "sasl.mechanism", "security.protocol", "ssl.key.location", "ssl.keystore.location",
    "ssl.certificate.pem", "ssl.ca.pem", "sasl.oauthbearer.token.endpoint.url", "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.assertion.private.key.file", "linger.ms", "message.max.bytes", "queue.buffering.max.messages",
    "passwordSecretRef", "PGPASSFILE", "Content-Type", "X-Tenant", "",
]  # fmt: skip


@pytest.mark.parametrize("name", [*SECRETS, *OTHERS])
def test_names_of_secrets_are_distinguished_from_names_of_other_settings(name: str) -> None:
    assert is_secret_setting(name) == (name in SECRETS)


def test_a_private_key_is_a_secret_under_any_name() -> None:
    assert is_secret_setting("certificate", "-----BEGIN PRIVATE KEY-----\n...")


def test_nested_settings_are_searched() -> None:
    settings = {"auth": {"user": "u", "password": "p"}, "token": 12345, "passwordRef": {"name": "secret-name"}}
    assert list(secret_names(settings)) == ["auth.password", "token"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:pw@h/db",
        "postgresql://u:pw@h1:5432,h2:5432/db",
        "postgresql://u:p#w@h/db",
        "postgresql://u:p?w@h/db",
        "postgresql://u:p/w@h/db",
        "postgresql://u:p@w@h/db",
        "postgresql://u@h/db?password=pw",
        "postgresql://u@h/db?sslmode=require&sslpassword=pw",
        "postgresql:///db?p%61ssword=pw",
        "redis://:pw@h:6379/0",
        "https://user:pw@h/hook",
    ],
)
def test_urls_with_a_password(url: str) -> None:
    assert contains_password(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@h:5432/db",
        "postgresql://u:@h/db",
        "postgresql://h1:5432,h2:5432/db?target_session_attrs=read-write",
        "postgresql:///db?host=/run/postgresql&user=u",
        "postgresql://h:5432/db?user=a@b",
        "postgresql://[::1]:5432/db",
        "redis://h:6379/0",
        "https://h/hook?x=1",
    ],
)
def test_urls_without_one(url: str) -> None:
    assert not contains_password(url)


@pytest.mark.parametrize("field", Sink.model_fields)
def test_every_reference_of_a_sink_is_found_by_its_type(field: str) -> None:
    """The operator mounts the Secrets that are found this way. A missed reference would be a Secret without a mount."""
    model = next(kind for kind in get_args(Sink.model_fields[field].annotation) if kind is not type(None))
    assert issubclass(model, UsesSecrets)
    named = [name for name in model.model_fields if name.endswith("_secret_ref")]
    references = {name: SecretRef(name=f"secret-{n}") for n, name in enumerate(named)}
    whole = model.model_construct(**(dict.fromkeys(model.model_fields) | references))
    assert [reference.name for reference in whole.secret_refs()] == [f"secret-{n}" for n in range(len(named))]
