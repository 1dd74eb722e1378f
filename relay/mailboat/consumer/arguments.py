"""Arguments of ``Consumer`` in place of a manifest: its source and its store of handled events.

Each becomes a part of an EventSubscription, so that both ways of configuration have the same rules. Secrets are passed
as a Secret of the manifest would be, and never become a part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mailboat_spec.redaction import is_secret_setting

SOURCE_SECRET: Final = "source"
STORE_SECRET: Final = "idempotency"
_URL: Final = "url"
_CA: Final = "ca.crt"

Values = dict[str, dict[str, str]]
"""Secrets by name and key."""


@dataclass(frozen=True, slots=True)
class Kafka:
    """A topic. ``config``: settings of librdkafka, for example ``{"security.protocol": "SASL_SSL", "sasl.password":
    ...}``."""

    servers: str | Sequence[str]
    topic: str = field(kw_only=True)
    group: str | None = field(default=None, kw_only=True)
    group_protocol: str = field(default="Classic", kw_only=True)
    config: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)

    def spec(self) -> dict[str, Any]:
        servers = self.servers.split(",") if isinstance(self.servers, str) else list(self.servers)
        kafka = {
            "bootstrapServers": [server.strip() for server in servers],
            "topic": self.topic,
            "group": self.group,
            "groupProtocol": self.group_protocol,
            "config": {name: value for name, value in self.config.items() if not is_secret_setting(name)},
            "configSecretRef": {"name": SOURCE_SECRET} if self.secrets() else None,
        }
        return {"source": {"kafka": kafka}}

    def secrets(self) -> Values:
        found = {name: value for name, value in self.config.items() if is_secret_setting(name)}
        return {SOURCE_SECRET: found} if found else {}


@dataclass(frozen=True, slots=True)
class PubSub:
    """A Pub/Sub subscription. ``credentials``: JSON key of a service account; None for those of the environment."""

    project: str
    subscription: str = field(kw_only=True)
    endpoint: str | None = field(default=None, kw_only=True)
    credentials: str | None = field(default=None, kw_only=True, repr=False)

    def spec(self) -> dict[str, Any]:
        reference = None if self.credentials is None else {"name": SOURCE_SECRET, "key": "credentials"}
        pubsub = {
            "project": self.project,
            "subscription": self.subscription,
            "endpoint": self.endpoint,
            "credentialsSecretRef": reference,
        }
        return {"source": {"pubsub": pubsub}}

    def secrets(self) -> Values:
        return {} if self.credentials is None else {SOURCE_SECRET: {"credentials": self.credentials}}


@dataclass(frozen=True, slots=True)
class Redis:
    """Redis or Valkey as the store of handled events. Times are durations as in manifests: ``720h``, ``30s``.

    ``ca``: CA certificates in PEM; None for those of the system.
    """

    url: str = field(repr=False)
    ca: str | None = field(default=None, kw_only=True, repr=False)
    prefix: str = field(default="mailboat", kw_only=True)
    consumer: str | None = field(default=None, kw_only=True)
    replicas: int = field(default=0, kw_only=True)
    ttl: str = field(default="720h", kw_only=True)
    lease: str = field(default="30s", kw_only=True)
    on_unavailable: str = field(default="Wait", kw_only=True)

    def spec(self) -> dict[str, Any]:
        reference = {"name": STORE_SECRET, "key": _URL}
        redis = {
            "urlSecretRef": reference,
            "caSecretRef": None if self.ca is None else {"name": STORE_SECRET, "key": _CA},
            "prefix": self.prefix,
            "consumer": self.consumer,
            "replicas": self.replicas,
        }
        store = {"redis": redis, "ttl": self.ttl, "lease": self.lease, "onUnavailable": self.on_unavailable}
        return {"idempotency": store}

    def secrets(self) -> Values:
        return {STORE_SECRET: {_URL: self.url} | ({} if self.ca is None else {_CA: self.ca})}


@dataclass(frozen=True, slots=True)
class Inbox:
    """A table in the database of the handlers' effects as the store of handled events."""

    url: str = field(repr=False)
    ttl: str = field(default="720h", kw_only=True)

    def spec(self) -> dict[str, Any]:
        reference = {"name": STORE_SECRET, "key": _URL}
        return {"idempotency": {"postgres": {"urlSecretRef": reference}, "ttl": self.ttl}}

    def secrets(self) -> Values:
        return {STORE_SECRET: {_URL: self.url}}
