"""The configuration of a relay: pending, undeclared, in use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mailboat.errors import ConfigError
from mailboat.runtime.config_source import Configuration
from mailboat.runtime.relay_config import RelayConfig
from mailboat.runtime.secrets import Secrets
from mailboat.runtime.timings import Timings
from mailboat.store.settings import ReadLimits
from mailboat_spec import read_documents
from support.manifests import Manifest, event_subscription, outbox_relay_on

URL = "postgresql://relay@db/shop"


def configuration(*subscriptions: Manifest, url: str = URL, version: int = 1) -> Configuration:
    documents = [outbox_relay_on(url), *subscriptions]
    read = read_documents([(f"document {number}", each) for number, each in enumerate(documents)])
    return Configuration(read.relays[0], tuple(read.subscriptions), version)


def to_file(path: Path) -> Manifest:
    return event_subscription("orders", {"log": {"path": str(path)}})


def followed(current: Configuration) -> RelayConfig:
    return RelayConfig(current, Secrets(None, {}), Timings(), ReadLimits(), follows=True)


async def test_a_configuration_is_pending_until_it_is_taken_up_and_undeclared_from_then_on(tmp_path: Path) -> None:
    config = followed(configuration(to_file(tmp_path / "a")))
    config.undeclared = False
    (before,) = config.subscription_set.parts.values()
    config.offer(configuration(to_file(tmp_path / "b"), version=2))

    assert config.changed.is_set()
    assert (config.version.number, config.undeclared) == (1, False)
    assert config.take_up() == [before.sink]
    assert (config.version.number, config.undeclared) == (2, True)
    assert not config.changed.is_set()


async def test_a_change_that_concerns_pods_only_is_in_use_at_once(tmp_path: Path) -> None:
    first = configuration(to_file(tmp_path / "a"))
    config = followed(first)
    config.undeclared = False
    config.offer(replace(first, version=2))

    assert (config.version.number, config.undeclared, config.changed.is_set()) == (2, False, False)


async def test_the_connection_of_the_pending_configuration_is_wanted() -> None:
    config = followed(configuration())
    connected = config.database_settings()
    config.offer(configuration(url="postgresql://relay@other/shop"))

    assert config.database_settings(connected).url == "postgresql://relay@other/shop"


async def test_a_missing_secret_keeps_the_url_of_an_open_connection_only() -> None:
    config = followed(configuration())
    connected = config.database_settings()
    resource = outbox_relay_on(URL)
    resource["spec"]["database"] = {"urlSecretRef": {"name": "shop-db", "key": "url"}}
    config.offer(Configuration(read_documents([("relay", resource)]).relays[0], ()))

    assert config.database_settings(connected).url == URL
    with pytest.raises(ConfigError, match="shop-db"):
        config.database_settings()
