"""Manifests with a value for every field, so that a test can change any field.

Some fields exclude each other (kinds of sinks, a URL and a reference to one), hence several manifests.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

_KEY = {"name": "some-secret", "key": "url"}
_RELAY_SPEC: Body = {
    "database": {"urlSecretRef": _KEY, "pooler": "Direct"},
    "outbox": {
        "tracking": "Log",
        "table": "public.outbox",
        "columns": {
            "preset": "debezium",
            "id": "id",
            "eventId": "id",
            "eventType": "event_type",
            "aggregateType": "aggregate_type",
            "aggregateId": "aggregate_id",
            "key": "aggregate_id",
            "payload": "payload_json",
            "contentType": "content_type",
            "headers": "headers",
            "tags": "tags",
            "traceparent": "trace",
            "createdAt": "created_at",
        },
        "manageSchema": False,
        "retention": {"after": "24h", "policy": "Drop", "maxAge": "720h", "maxBytes": "10Gi"},
        "durability": "Replicated",
    },
    "runtime": "Deployment",
    "replicas": 3,
    "wake": {"notify": "Never", "pollInterval": "1.5s", "idleAfter": 5, "maxIdleInterval": "1m30s"},
    "template": {
        "labels": {"team": "shop"},
        "annotations": {"example.com/why": "because"},
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": 1, "memory": "256Mi"}},
        "env": [
            {"name": "TZ", "value": "UTC"},
            {"name": "PGPASSWORD", "valueFrom": {"secretKeyRef": {"name": "some-secret", "key": "password"}}},
        ],
        "nodeSelector": {"kubernetes.io/arch": "arm64"},
        "tolerations": [
            {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 60}
        ],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "serviceAccountName": "relay",
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsUser": 1000},
    },
}
_SUBSCRIPTION_SPEC: Body = {
    "relayRef": {"name": "orders"},
    "state": "Paused",
    "filter": {
        "eventTypes": ["order.*"],
        "aggregateTypes": ["order", "cart"],
        "tags": {"allOf": ["eu"], "anyOf": ["a", "b"], "noneOf": ["test"]},
    },
    "partitions": 16,
    "ordering": "None",
    "start": {"from": "Time", "time": "2026-01-31T12:00:00Z"},
    "format": "Raw",
    "delivery": {
        "batchSize": 100,
        "maxAttempts": 5,
        "backoff": {"initial": "500ms", "factor": 1.5, "max": "10m", "jitter": 0},
        "timeout": "10s",
        "onExhausted": "Block",
    },
}
_CONSUMED_SPEC: Body = {
    "state": "Running",
    "filter": {"eventTypes": ["order.*"], "aggregateTypes": ["order"]},
    "runtime": "InProcess",
    "concurrency": 16,
    "sink": {"pull": {}},
    "delivery": {
        "maxAttempts": 5,
        "backoff": {"initial": "500ms", "factor": 1.5, "max": "10m", "jitter": 0},
        "timeout": "10s",
        "noHandler": "Ignore",
        "onExhausted": "DeadLetter",
        "deadLetter": {"topic": "orders.dead", "stopAt": {"consecutive": 100}},
    },
}
_SOURCES: list[Body] = [
    {
        "kafka": {
            "bootstrapServers": ["kafka-0:9092"],
            "topic": "orders",
            "group": "billing",
            "groupProtocol": "Consumer",
            "config": {"fetch.min.bytes": "1", "linger.ms": "5"},
            "configSecretRef": {"name": "kafka-secrets"},
        }
    },
    {
        "pubsub": {
            "project": "acme",
            "subscription": "orders-billing",
            "endpoint": "localhost:8085",
            "credentialsSecretRef": _KEY,
        }
    },
]
_STORES: list[Body] = [
    {
        "redis": {"urlSecretRef": _KEY, "caSecretRef": _KEY, "prefix": "pf:evt", "consumer": "billing", "replicas": 1},
        "ttl": "24h",
        "lease": "10s",
        "onUnavailable": "Handle",
    },
    {"postgres": {"urlSecretRef": _KEY}},
]
_SINKS: dict[str, Body] = {
    "kafka": {
        "bootstrapServers": ["kafka-0:9092", "[::1]:9093"],
        "topic": "orders",
        "config": {"linger.ms": "5", "ssl.certificate.pem": "-----BEGIN CERTIFICATE-----"},
        "configSecretRef": {"name": "kafka-secrets"},
    },
    "pubsub": {"project": "acme", "topic": "orders", "endpoint": "localhost:8085", "credentialsSecretRef": _KEY},
    "log": {"path": "/tmp/events"},
    "custom": {"type": "nats", "config": {"servers": ["n:4222"]}, "configSecretRef": {"name": "nats"}},
}
_WITH_TOPICS = ("kafka", "pubsub", "log", "custom")


def _body(kind: str, name: str, spec: Body) -> Body:
    return {"apiVersion": "mailboat.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def _subscription(kind: str, sink: Body, **changes: Any) -> Body:
    spec = {**_SUBSCRIPTION_SPEC, **changes, "sink": {kind: sink}}
    if kind in _WITH_TOPICS:
        spec["delivery"] = {**spec["delivery"], "deadLetter": {"topic": "orders.dead"}}
    return _body("EventSubscription", f"to-{kind}", spec)


COMPLETE_RELAYS: list[Body] = [
    _body("OutboxRelay", "orders", _RELAY_SPEC),
    _body("OutboxRelay", "orders", {**_RELAY_SPEC, "database": {"url": "postgresql://relay@db/shop"}}),
]
COMPLETE_SUBSCRIPTIONS: list[Body] = [
    *(_subscription(kind, sink) for kind, sink in _SINKS.items()),
    _subscription("pull", {}, delivery={"groupBy": ["tenant", "user"], "maxGroup": 500, "noHandler": "Ignore"}),
    _subscription("log", {}, start={"from": "Latest"}),
    _subscription("log", {}, start={"from": "Position", "position": 2**63 - 1}),
    *(
        _body("EventSubscription", "billing", {**_CONSUMED_SPEC, "source": source, "idempotency": store})
        for source, store in zip(_SOURCES, _STORES, strict=True)
    ),
    _body(
        "EventSubscription",
        "billing",
        {
            **_CONSUMED_SPEC,
            "source": _SOURCES[0],
            "idempotency": {"redis": {"url": "redis://redis"}},
            "start": {"from": "Latest"},
        },
    ),
    _body(
        "EventSubscription",
        "billing",
        {**_CONSUMED_SPEC, "source": _SOURCES[1], "idempotency": {"postgres": {"url": "postgresql://app@db/shop"}}},
    ),
]
COMPLETE: list[Body] = [*COMPLETE_RELAYS, *COMPLETE_SUBSCRIPTIONS]
