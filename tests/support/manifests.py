"""Manifests of both resources with required fields only. A test adds the fields that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mailboat_spec import EventSubscription
from mailboat_spec.names import API_VERSION

Manifest = dict[str, Any]

DATABASE_SECRET = "orders-db"
LOG: Manifest = {"log": {}}


def outbox_relay(
    name: str = "orders", *, namespace: str | None = "shop", metadata: Mapping[str, Any] | None = None, **spec: Any
) -> Manifest:
    """Return an OutboxRelay. Further arguments are fields of its ``spec``."""
    database = {"urlSecretRef": {"name": DATABASE_SECRET, "key": "url"}}
    return _resource("OutboxRelay", name, namespace, metadata, {"database": database, **spec})


def outbox_relay_on(
    url: str, *, name: str = "orders", namespace: str = "shop", wake: Mapping[str, Any] | None = None, **outbox: Any
) -> Manifest:
    """Return an OutboxRelay on a real database. Further arguments are fields of ``spec.outbox``."""
    wake = {"pollInterval": "50ms"} if wake is None else wake
    return outbox_relay(name, namespace=namespace, database={"url": url}, outbox=outbox, wake=wake)


def event_subscription(
    name: str = "to-log",
    sink: Mapping[str, Any] = LOG,
    *,
    relay: str = "orders",
    namespace: str | None = "shop",
    metadata: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Manifest:
    """Return an EventSubscription. Further arguments are fields of its ``spec``."""
    spec = {"relayRef": {"name": relay}, "sink": dict(sink), **spec}
    return _resource("EventSubscription", name, namespace, metadata, spec)


def consumed(
    name: str = "billing", source: Mapping[str, Any] | None = None, *, namespace: str | None = "shop", **spec: Any
) -> Manifest:
    """Return an EventSubscription that reads a broker, by default the topic of ``kafka_sink``."""
    spec = {"source": dict(source or kafka_sink()), "sink": {"pull": {}}, **spec}
    return _resource("EventSubscription", name, namespace, None, spec)


def declared(name: str = "all", **spec: Any) -> EventSubscription:
    """Return an EventSubscription in the form that stores declare."""
    return EventSubscription.model_validate(event_subscription(name, **spec))


def kafka_sink(bootstrap: str = "kafka:9092", topic: str = "orders", **more: Any) -> Manifest:
    return {"kafka": {"bootstrapServers": [bootstrap], "topic": topic, **more}}


def pubsub_sink(host: str, topic: str, project: str = "faults") -> Manifest:
    return {"pubsub": {"project": project, "topic": topic, "endpoint": host}}


def _resource(
    kind: str, name: str, namespace: str | None, metadata: Mapping[str, Any] | None, spec: Manifest
) -> Manifest:
    place = {} if namespace is None else {"namespace": namespace}
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name, **place, **(metadata or {})},
        "spec": spec,
    }
