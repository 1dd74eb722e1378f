"""Manifests with one invalid field each, and the messages that refuse them.

One table for both validators: the models, used by the CLI and the operator, and the API server.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, NamedTuple

RELAY: dict[str, Any] = {
    "apiVersion": "mailboat.dev/v1alpha1",
    "kind": "OutboxRelay",
    "metadata": {"name": "orders"},
    "spec": {"database": {"urlSecretRef": {"name": "orders-db", "key": "url"}}},
}
SUBSCRIPTION: dict[str, Any] = {
    "apiVersion": "mailboat.dev/v1alpha1",
    "kind": "EventSubscription",
    "metadata": {"name": "out"},
    "spec": {
        "relayRef": {"name": "orders"},
        "sink": {"kafka": {"bootstrapServers": ["kafka:9092"], "topic": "orders"}},
    },
}
CONSUMED: dict[str, Any] = {
    "apiVersion": "mailboat.dev/v1alpha1",
    "kind": "EventSubscription",
    "metadata": {"name": "billing"},
    "spec": {"source": {"kafka": {"bootstrapServers": ["kafka:9092"], "topic": "orders"}}, "sink": {"pull": {}}},
}
"""An EventSubscription that reads a broker."""
REMOVED = object()


def changed(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy of a document with one field set or removed. Missing parents are created."""
    copied = copy.deepcopy(body)
    *parents, last = path.split(".")
    here = copied
    for step in parents:
        here = here.setdefault(step, {})
    if value is REMOVED:
        del here[last]
    else:
        here[last] = value
    return copied


@dataclass(frozen=True)
class Later:
    """Reason why the API server accepts a manifest that the operator refuses (Ready False, InvalidSpec)."""

    why: str


class Bad(NamedTuple):
    """One field of a valid manifest, and an invalid value."""

    path: str
    value: object
    where: str
    """The field in the message."""
    what: str
    """Text of the model's message."""
    server: str | Later = ""
    """Text of the API server's message, if it differs."""


RELAY_REFUSALS: list[Bad] = [
    Bad("spec", REMOVED, "spec", "is required: What the relay should be.", "Required value"),
    Bad("spec.database", REMOVED, "spec.database", "is required: The database that holds the outbox", "Required value"),
    Bad(
        "spec.database",
        {},
        "spec.database",
        "needs urlSecretRef: {name: ..., key: ...} (or url, if it holds no password)",
    ),
    Bad("spec.database.url", "postgresql://h/db", "spec.database", "has both url and urlSecretRef: remove one of them"),
    Bad(
        "spec.database",
        {"url": "postgresql://u:pw@h/db"},
        "spec.database.url",
        "holds a password: put the URL in a Secret",
    ),
    Bad("spec.database", {"url": "mysql://h/db"}, "spec.database.url", "must begin with postgresql:// or postgres://"),
    Bad(
        "spec.database", {"url": "host=h dbname=d"}, "spec.database.url", "must begin with postgresql:// or postgres://"
    ),
    Bad("spec.database.urlSecretRef.key", "..", "spec.database.urlSecretRef.key", "is not a key of a Secret"),
    Bad("spec.database.urlSecretRef.key", "a/b", "spec.database.urlSecretRef.key", "is not a key of a Secret"),
    Bad("spec.database.urlSecretRef.name", "../x", "spec.database.urlSecretRef.name", "is not a valid name"),
    Bad(
        "spec.database.urlSecretRef.key",
        REMOVED,
        "spec.database.urlSecretRef.key",
        "is required: Key inside the Secret",
        "Required value",
    ),
    Bad(
        "spec.database.pooler",
        "PgBouncer",
        "spec.database.pooler",
        "must be one of Auto, Direct, Transaction",
        'supported values: "Auto", "Direct", "Transaction"',
    ),
    Bad(
        "spec.outbox.tracking",
        "log",
        "spec.outbox.tracking",
        'Log, Rows, not "log"; did you mean Log?',
        'supported values: "Log", "Rows"',
    ),
    Bad("spec.outbox.table", "outbox", "spec.outbox.table", 'must be schema.table, like "public.outbox"'),
    Bad("spec.outbox.table", "Shop.Outbox", "spec.outbox.table", "must be schema.table"),
    Bad("spec.outbox.table", "a.b; drop table c", "spec.outbox.table", "must be schema.table"),
    Bad("spec.outbox.columns.publishedAt", "sent", "spec.outbox.columns.publishedAt", "is for tracking Rows only"),
    Bad("spec.outbox.columns.preset", "rows", "spec.outbox.columns.preset", "rows goes with tracking Rows"),
    Bad(
        "spec.outbox",
        {"tracking": "Rows", "columns": {"preset": "mailboat"}},
        "spec.outbox.columns.preset",
        "mailboat goes with tracking Log",
    ),
    Bad("spec.outbox.columns.id", 'a"b', "spec.outbox.columns.id", "is not a column name"),
    Bad(
        "spec.outbox.manageSchema",
        "yes",
        "spec.outbox.manageSchema",
        "must be true or false, not a string",
        'must be of type boolean: "string"',
    ),
    Bad(
        "spec.outbox.retention.policy",
        "Drop",
        "spec.outbox.retention.policy",
        "Drop needs a limit: set maxAge or maxBytes",
    ),
    Bad("spec.outbox.retention.maxAge", "900h", "spec.outbox.retention.maxAge", "has no effect with policy Hold"),
    Bad("spec.outbox.retention.maxBytes", "10Gi", "spec.outbox.retention.maxBytes", "has no effect with policy Hold"),
    Bad(
        "spec.outbox.retention",
        {"policy": "Drop", "maxAge": "24h"},
        "spec.outbox.retention.maxAge",
        "is 24h, shorter than after (720h): raise it or lower after",
    ),
    Bad("spec.outbox.retention", {"policy": "Drop", "maxBytes": 0}, "spec.outbox.retention.maxBytes", "more than 0"),
    Bad("spec.outbox.retention", {"policy": "Drop", "maxBytes": "1GB"}, "spec.outbox.retention.maxBytes", "not a size"),
    Bad(
        "spec.outbox.retention",
        {"policy": "Drop", "maxBytes": []},
        "spec.outbox.retention.maxBytes",
        "must be a size",
        'must be of type integer,string: "array"',
    ),
    Bad(
        "spec.outbox.retention.after",
        "30d",
        "spec.outbox.retention.after",
        'write "720h"',
        "must be a duration between 1m and 87600h (units: h, m, s, ms, us, ns)",
    ),
    Bad(
        "spec.outbox.retention.after",
        "1s",
        "spec.outbox.retention.after",
        "must be between 1m and 87600h, not 1s",
        "must be a duration between 1m and 87600h (units: h, m, s, ms, us, ns)",
    ),
    Bad(
        "spec.outbox.durability",
        "Fsynced",
        "spec.outbox.durability",
        "must be one of Committed, Flushed, Replicated",
        'supported values: "Committed", "Flushed", "Replicated"',
    ),
    Bad(
        "spec.runtime",
        "sidecar",
        "spec.runtime",
        "must be one of Deployment, Sidecar",
        'supported values: "Deployment", "Sidecar"',
    ),
    Bad("spec.replicas", -1, "spec.replicas", "must be at least 0, not -1", "should be greater than or equal to 0"),
    Bad(
        "spec.replicas",
        2.5,
        "spec.replicas",
        "must be a whole number, not a number",
        'must be of type integer: "number"',
    ),
    Bad(
        "spec.replicas",
        True,
        "spec.replicas",
        "must be a whole number, not a boolean",
        'must be of type integer: "boolean"',
    ),
    Bad(
        "spec.wake.notify",
        False,
        "spec.wake.notify",
        "must be one of Auto, Always, Never, not a boolean (YAML reads",
        'must be of type string: "boolean"',
    ),
    Bad(
        "spec.wake.pollInterval",
        5,
        "spec.wake.pollInterval",
        "a duration needs a unit",
        'must be of type string: "integer"',
    ),
    Bad(
        "spec.wake.pollInterval",
        True,
        "spec.wake.pollInterval",
        "must be a duration",
        'must be of type string: "boolean"',
    ),
    Bad(
        "spec.wake.pollInterval",
        "2m",
        "spec.wake.pollInterval",
        "is 2m, longer than maxIdleInterval (1m)",
        "is 2m, longer than maxIdleInterval (60s): make it shorter or raise maxIdleInterval",
    ),
    Bad(
        "spec.wake.idleAfter",
        0,
        "spec.wake.idleAfter",
        "must be at least 1, not 0",
        "should be greater than or equal to 1",
    ),
    Bad(
        "spec.wake.maxIdleInterval",
        "2h",
        "spec.wake.maxIdleInterval",
        "must be between 1ms and 1h, not 2h",
        "must be a duration between 1ms and 1h (units: h, m, s, ms, us, ns)",
    ),
    Bad(
        "spec.template.env",
        [{"name": "A B"}],
        "spec.template.env[0].name",
        "is not the name of an environment variable",
    ),
    Bad("spec.template.env", [{"name": "PGPASSWORD", "value": "x"}], "spec.template.env[0].value", "is a secret"),
    Bad(
        "spec.template.env",
        [{"name": "A", "value": "", "valueFrom": {}}],
        "spec.template.env[0]",
        "both value and valueFrom",
    ),
    Bad(
        "spec.template.resources.limits",
        {"memory": "5GB"},
        "spec.template.resources.limits.memory",
        'is not a quantity: write it like "500m"',
    ),
    Bad(
        "spec.template.tolerations",
        [{"effect": "No"}],
        "spec.template.tolerations[0].effect",
        "must be one of NoSchedule",
        'supported values: "NoSchedule", "PreferNoSchedule", "NoExecute"',
    ),
    Bad(
        "spec.template.labels",
        {"a": 1},
        "spec.template.labels.a",
        "must be a string, not a number: put it in quotes",
        'must be of type string: "integer"',
    ),
    Bad(
        "spec.database.urlSecretRef",
        "orders-db",
        "spec.database.urlSecretRef",
        "must be a mapping, not a string: write {name: ..., key: ...}",
        'must be of type object: "string"',
    ),
    Bad(
        "spec.spec",
        {"replicas": 2},
        "spec.spec",
        "stands inside spec itself: move what is in it up by one level",
        'unknown field "spec.spec"',
    ),
    Bad("spec.template", [], "spec.template", "must be a mapping, not a list", 'must be of type object: "array"'),
    Bad(
        "metadata",
        REMOVED,
        "metadata",
        "is required: Who the resource is",
        "Required value: name or generateName is required",
    ),
    Bad(
        "metadata.name",
        REMOVED,
        "metadata.name",
        "is required: Name of the resource",
        "Required value: name or generateName is required",
    ),
    Bad(
        "metadata.name",
        5,
        "metadata.name",
        "must be a string, not a number: put it in quotes",
        "cannot unmarshal number",
    ),
    Bad("metadata.name", "Orders", "metadata.name", "is not a valid name: use lower-case letters, digits and -"),
    Bad("metadata.name", "2nd-orders", "metadata.name", "must begin with a letter: a Service is named after it"),
    Bad("metadata.name", "-a", "metadata.name", "is not a valid name"),
    Bad("metadata.name", "a.b", "metadata.name", "is not a valid name"),
    Bad(
        "metadata.name",
        "a" * 64,
        "metadata.name",
        "is too long: at most 63 characters",
        "is too long: at most 57 characters",
    ),
    Bad("metadata.name", "orders\n", "metadata.name", "is not a valid name"),
    Bad(
        "metadata.namespace",
        "My Shop",
        "metadata.namespace",
        "is not a valid name",
        "namespace of the provided object does not match",
    ),
    Bad(
        "metadata.lables",
        {},
        "metadata.lables",
        "unknown field, did you mean labels?",
        'unknown field "metadata.lables"',
    ),
]

KAFKA = "spec.sink.kafka"
SUBSCRIPTION_REFUSALS: list[Bad] = [
    Bad("spec.relayRef", REMOVED, "spec", "needs relayRef: {name: ...} to read an outbox, or source"),
    Bad("spec.runtime", "InProcess", "spec.runtime", "is for source only"),
    Bad("spec.concurrency", 8, "spec.concurrency", "is for source only"),
    Bad(
        "spec.delivery.deadLetter",
        {"topic": "d", "stopAt": {"consecutive": 9}},
        "spec.delivery.deadLetter.stopAt",
        "is for source only",
    ),
    Bad(
        "spec.state",
        "Runing",
        "spec.state",
        'must be one of Running, Paused, not "Runing"; did you mean Running?',
        'supported values: "Running", "Paused"',
    ),
    Bad(
        "spec.filter.eventTypes",
        ["a", "b[c]"],
        "spec.filter.eventTypes[1]",
        "character classes ([...]) are not supported",
    ),
    Bad("spec.filter.eventTypes", [""], "spec.filter.eventTypes[0]", "an empty pattern matches nothing"),
    Bad(
        "spec.filter.eventTypes",
        [7],
        "spec.filter.eventTypes[0]",
        "must be a pattern: put it in quotes",
        'must be of type string: "integer"',
    ),
    Bad(
        "spec.filter.eventTypes",
        "order.*",
        "spec.filter.eventTypes",
        "must be a list, not a string: put it in brackets",
        'must be of type array: "string"',
    ),
    Bad(
        "spec.filter.eventTypes",
        ["a"] * 257,
        "spec.filter.eventTypes",
        "takes at most 256 items",
        "Too many: 257: must have at most 256 items",
    ),
    Bad("spec.filter.tags", {"allOf": ["a"], "noneOf": ["a"]}, "spec.filter.tags.noneOf", '"a" is in allOf too'),
    Bad("spec.filter.tags", {"anyOf": ["a"], "noneOf": ["a"]}, "spec.filter.tags.noneOf", "holds every tag of anyOf"),
    Bad("spec.filter.tags.anyOf", [""], "spec.filter.tags.anyOf[0]", "must not be empty"),
    Bad("spec.partitions", 0, "spec.partitions", "must be at least 1, not 0", "should be greater than or equal to 1"),
    Bad(
        "spec.partitions", 257, "spec.partitions", "must be at most 256, not 257", "should be less than or equal to 256"
    ),
    Bad(
        "spec.partitions",
        "8",
        "spec.partitions",
        "must be a whole number, not a string: write it without quotes",
        'must be of type integer: "string"',
    ),
    Bad("spec.ordering", "Strict", "spec.ordering", "must be one of Key, None", 'supported values: "Key", "None"'),
    Bad(
        "spec.start.from",
        "Beginning",
        "spec.start.from",
        "must be one of Earliest, Latest, Time, Position",
        'supported values: "Earliest", "Latest", "Time", "Position"',
    ),
    Bad(
        "spec.start.from", "Time", "spec.start.time", 'is required with from: Time: write time: "2026-01-31T12:00:00Z"'
    ),
    Bad("spec.start.from", "Position", "spec.start.position", "is required with from: Position: write position: 12345"),
    Bad(
        "spec.start.position",
        5,
        "spec.start.position",
        "is for from: Position only, not Earliest: change from or remove it",
    ),
    Bad(
        "spec.start",
        {"from": "Position", "position": 5, "time": "2026-01-31T12:00:00Z"},
        "spec.start.time",
        "is for from: Time only, not Position",
    ),
    Bad("spec.start", {"from": "Time", "time": "2026-01-31"}, "spec.start.time", "must be a date, a time and a zone"),
    Bad(
        "spec.start",
        {"from": "Time", "time": "2026-01-31T12:00:00"},
        "spec.start.time",
        "must be a date, a time and a zone",
    ),
    Bad(
        "spec.start",
        {"from": "Time", "time": date(2026, 1, 31)},
        "spec.start.time",
        "must be a date, a time and a zone",
    ),
    Bad("spec.start", {"from": "Time", "time": datetime(2026, 1, 31)}, "spec.start.time", "and a zone"),  # noqa: DTZ001
    Bad(
        "spec.start",
        {"from": "Time", "time": 1700000000},
        "spec.start.time",
        "must be a date, a time and a zone",
        'must be of type string: "integer"',
    ),
    Bad(
        "spec.start",
        {"from": "Time", "time": "0001-01-01T00:00:00+05:00"},
        "spec.start.time",
        "between the years 1 and 9999",
        "must be a date, a time and a zone",
    ),
    Bad(
        "spec.start",
        {"from": "Time", "time": "2026-02-30T00:00:00Z"},
        "spec.start.time",
        "day value is outside expected range",
        "must be a date, a time and a zone",
    ),
    Bad(
        "spec.start",
        {"from": "Position", "position": -1},
        "spec.start.position",
        "must be at least 0, not -1",
        "should be greater than or equal to 0",
    ),
    Bad("spec.sink", REMOVED, "spec.sink", "is required: Where events go", "Required value"),
    Bad("spec.sink", {}, "spec.sink", "needs exactly one of kafka, pubsub, http, redis, postgres, log, custom, pull"),
    Bad("spec.sink", {"log": None}, "spec.sink", "(one without settings is written log: {})"),
    Bad(
        "spec.sink.log",
        {},
        "spec.sink",
        "has kafka and log: keep one",
        "has kafka, log, more than one: keep one, and give each other one a subscription of its own",
    ),
    Bad(
        f"{KAFKA}.bootstrapServers",
        [],
        f"{KAFKA}.bootstrapServers",
        "needs at least 1 item",
        "should have at least 1 items",
    ),
    Bad(
        f"{KAFKA}.bootstrapServers",
        "kafka:9092",
        f"{KAFKA}.bootstrapServers",
        "must be a list, not a string",
        'must be of type array: "string"',
    ),
    Bad(f"{KAFKA}.bootstrapServers", ["kafka"], f"{KAFKA}.bootstrapServers[0]", "must be host:port"),
    Bad(
        f"{KAFKA}.bootstrapServers", ["SASL_SSL://k:9"], f"{KAFKA}.bootstrapServers[0]", "without a protocol before it"
    ),
    Bad(f"{KAFKA}.topic", "a b", f"{KAFKA}.topic", "is not a valid Kafka topic"),
    Bad(f"{KAFKA}.topic", "..", f"{KAFKA}.topic", "is not a valid Kafka topic"),
    Bad(
        f"{KAFKA}.topic",
        "a" * 250,
        f"{KAFKA}.topic",
        "is too long: at most 249 characters",
        "Too long: may not be more than 249 bytes",
    ),
    Bad(
        f"{KAFKA}.config",
        {"linger.ms": 5},
        f'{KAFKA}.config["linger.ms"]',
        "must be a string, not a number: put it in quotes",
        'must be of type string: "integer"',
    ),
    Bad(
        f"{KAFKA}.config",
        {"sasl.password": "hunter2"},
        f'{KAFKA}.config["sasl.password"]',
        "is a secret and must not be written here: put it in a Secret and refer to it by configSecretRef: {name: ...}",
    ),
    Bad(f"{KAFKA}.config", {"ssl.key.password": "x"}, f'{KAFKA}.config["ssl.key.password"]', "is a secret"),
    *(
        Bad(f"{KAFKA}.config", {name: "x"}, f'{KAFKA}.config["{name}"]', "a subscription may set")
        for name in (
            "sasl.kerberos.kinit.cmd",
            "ssl.ca.location",
            "plugin.library.paths",
            "enable.idempotence",
            "linger.msec",
        )
    ),
    Bad(
        f"{KAFKA}.configSecretRef",
        {"name": "x", "key": "y"},
        f"{KAFKA}.configSecretRef.key",
        "unknown field, known here: name",
        'unknown field "spec.sink.kafka.configSecretRef.key"',
    ),
    Bad("spec.sink", {"pubsub": {"project": "acme"}}, "spec.sink.pubsub.topic", "is required", "Required value"),
    Bad(
        "spec.sink",
        {"pubsub": {"project": "Acme Inc", "topic": "orders"}},
        "spec.sink.pubsub.project",
        "not a project id",
    ),
    Bad(
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "goog-x"}},
        "spec.sink.pubsub.topic",
        "not a valid Pub/Sub topic",
    ),
    Bad(
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "ab"}},
        "spec.sink.pubsub.topic",
        "not a valid Pub/Sub topic",
    ),
    Bad(
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "projects/acme/topics/orders"}},
        "spec.sink.pubsub.topic",
        'without "projects/.../topics/"',
    ),
    Bad(
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "orders", "endpoint": "http://x"}},
        "spec.sink.pubsub.endpoint",
        "must be host:port",
    ),
    Bad("spec.sink", {"http": {"url": "ftp://h/"}}, "spec.sink.http.url", "must begin with https:// or http://"),
    Bad("spec.sink", {"http": {"url": "https://u:p@h/"}}, "spec.sink.http.url", "holds a password"),
    Bad("spec.sink", {"http": {}}, "spec.sink.http", "needs urlSecretRef"),
    Bad(
        "spec.sink",
        {"http": {"url": "https://h/", "headers": {"Authorization": "Bearer x"}}},
        "spec.sink.http.headers.Authorization",
        "refer to it by headersSecretRef",
    ),
    Bad("spec.sink", {"redis": {"url": "redis://:pw@h", "stream": "s"}}, "spec.sink.redis.url", "holds a password"),
    Bad("spec.sink", {"redis": {"url": "redis://h"}}, "spec.sink.redis.stream", "is required", "Required value"),
    Bad(
        "spec.sink", {"postgres": {"url": "postgresql://h/d", "table": "t"}}, "spec.sink.postgres.table", "schema.table"
    ),
    Bad(
        "spec.sink",
        {"log": {"file": "x"}},
        "spec.sink.log.file",
        "unknown field, known here: path",
        'unknown field "spec.sink.log.file"',
    ),
    Bad(
        "spec.sink",
        {"custom": {}},
        "spec.sink.custom.type",
        "is required: Name that the sink's package registers",
        "Required value",
    ),
    Bad("spec.sink", {"custom": {"type": "a b"}}, "spec.sink.custom.type", "is not the name of a sink"),
    Bad(
        "spec.sink",
        {"custom": {"type": "nats", "config": {"auth": {"token": "x"}}}},
        'spec.sink.custom.config["auth.token"]',
        "is a secret",
        Later("a rule can't validate a field without a schema"),
    ),
    Bad(
        "spec.sink",
        {"kafak": {}},
        "spec.sink.kafak",
        "unknown field, did you mean kafka?",
        'unknown field "spec.sink.kafak"',
    ),
    Bad(
        "spec.format",
        "JSON",
        "spec.format",
        "must be one of CloudEvents, CloudEventsJson, Outbox, Raw",
        'supported values: "CloudEvents", "CloudEventsJson", "Outbox", "Raw"',
    ),
    Bad(
        "spec.schemas",
        {"configMapRef": {}},
        "spec.schemas.configMapRef.name",
        "is required: Name of the ConfigMap",
        "Required value",
    ),
    Bad("spec.delivery.groupBy", ["tenant"], "spec.delivery.groupBy", "is for sink: {pull: {}} only: remove it"),
    Bad(
        "spec.delivery.batchSize",
        0,
        "spec.delivery.batchSize",
        "must be at least 1, not 0",
        "should be greater than or equal to 1",
    ),
    Bad(
        "spec.delivery.batchSize",
        10_001,
        "spec.delivery.batchSize",
        "must be at most 10000, not 10001",
        "should be less than or equal to 10000",
    ),
    Bad(
        "spec.delivery.maxAttempts",
        0,
        "spec.delivery.maxAttempts",
        "must be at least 1, not 0",
        "should be greater than or equal to 1",
    ),
    Bad(
        "spec.delivery.maxAttempts",
        1001,
        "spec.delivery.maxAttempts",
        "must be at most 1000, not 1001",
        "should be less than or equal to 1000",
    ),
    Bad(
        "spec.delivery.timeout",
        "500ms",
        "spec.delivery.timeout",
        "must be between 1s and 10m, not 500ms",
        "must be a duration between 1s and 10m (units: h, m, s, ms, us, ns)",
    ),
    Bad(
        "spec.delivery.timeout",
        "11m",
        "spec.delivery.timeout",
        "must be between 1s and 10m, not 11m",
        "must be a duration between 1s and 10m (units: h, m, s, ms, us, ns)",
    ),
    Bad(
        "spec.delivery.backoff.factor",
        0.5,
        "spec.delivery.backoff.factor",
        "must be at least 1, not 0.5",
        "should be greater than or equal to 1",
    ),
    Bad(
        "spec.delivery.backoff.factor",
        "2",
        "spec.delivery.backoff.factor",
        "must be a number, not a string",
        'must be of type number: "string"',
    ),
    Bad(
        "spec.delivery.backoff.jitter",
        1.5,
        "spec.delivery.backoff.jitter",
        "must be at most 1, not 1.5",
        "should be less than or equal to 1",
    ),
    Bad(
        "spec.delivery.backoff.jitter",
        -0.1,
        "spec.delivery.backoff.jitter",
        "must be at least 0, not -0.1",
        "should be greater than or equal to 0",
    ),
    Bad(
        "spec.delivery.backoff.jitter",
        math.nan,
        "spec.delivery.backoff.jitter",
        "must be a finite number",
        Later("JSON has no such number"),
    ),
    Bad(
        "spec.delivery.backoff.initial",
        "2m",
        "spec.delivery.backoff.initial",
        "is 2m, longer than max (1m)",
        "is 2m, longer than max (60s): make it shorter or raise max",
    ),
    Bad(
        "spec.delivery.onExhausted",
        "Deadletter",
        "spec.delivery.onExhausted",
        "did you mean DeadLetter?",
        'supported values: "DeadLetter", "Block"',
    ),
    Bad("spec.delivery.deadLetter", {}, "spec.delivery.deadLetter.topic", "is required with relayRef"),
    Bad("spec.delivery.deadLetter.topic", "a b", "spec.delivery.deadLetter.topic", "is not a valid Kafka topic"),
    Bad(
        "spec.delivery.deadLetter.topic",
        "orders",
        "spec.delivery.deadLetter.topic",
        "is the topic of the sink or source",
    ),
    Bad("spec.idempotency", {"redis": {"url": "redis://h"}}, "spec.idempotency", "is for source only"),
    Bad(
        "spec.delivery.backof",
        {},
        "spec.delivery.backof",
        "unknown field, did you mean backoff?",
        'unknown field "spec.delivery.backof"',
    ),
    Bad(
        "spec.delivery.batch_size",
        5,
        "spec.delivery.batch_size",
        "unknown field, did you mean batchSize?",
        'unknown field "spec.delivery.batch_size"',
    ),
    Bad(
        "spec.delivery.deadletter",
        {},
        "spec.delivery.deadletter",
        "unknown field, did you mean deadLetter?",
        'unknown field "spec.delivery.deadletter"',
    ),
    Bad(
        "spec.batchSize",
        5,
        "spec.batchSize",
        "unknown field here, it belongs in spec.delivery.batchSize",
        'unknown field "spec.batchSize"',
    ),
    Bad(
        "spec.nonsense",
        5,
        "spec.nonsense",
        "unknown field, known here: relayRef, source, runtime",
        'unknown field "spec.nonsense"',
    ),
    Bad("spce", {}, "spce", "unknown field, did you mean spec?", 'unknown field "spce"'),
]

SOURCE = "spec.source.kafka"
PUBSUB_SOURCE = {"pubsub": {"project": "acme", "subscription": "orders"}}
CONSUMED_REFUSALS: list[Bad] = [
    Bad(
        "spec.sink.pull.emitDeadLetters",
        True,
        "spec.sink.pull.emitDeadLetters",
        "is for relayRef only, consumers of a broker have delivery.deadLetter",
    ),
    Bad("spec.relayRef", {"name": "orders"}, "spec", "has both relayRef and source"),
    Bad("spec.source", {}, "spec.source", "needs exactly one of kafka and pubsub"),
    Bad("spec.source.pubsub", PUBSUB_SOURCE["pubsub"], "spec.source", "has kafka and pubsub"),
    Bad(
        "spec.source",
        {"pubsub": {"project": "acme", "subscription": "a b"}},
        "spec.source.pubsub.subscription",
        "is not a valid Pub/Sub subscription",
    ),
    Bad(f"{SOURCE}.group", "a b", f"{SOURCE}.group", "is not the name of a consumer group"),
    Bad(
        f"{SOURCE}.groupProtocol",
        "KIP848",
        f"{SOURCE}.groupProtocol",
        "must be one of Classic, Consumer",
        'supported values: "Classic", "Consumer"',
    ),
    Bad(
        f"{SOURCE}.config",
        {"group.id": "x"},
        f'{SOURCE}.config["group.id"]',
        "it has a field of its own, spec.source.kafka.group",
        "group.id is none of the librdkafka settings",
    ),
    Bad(
        f"{SOURCE}.config",
        {"sasl.password": "x"},
        f'{SOURCE}.config["sasl.password"]',
        "is a secret and must not be written here",
    ),
    Bad("spec.sink", {"log": {}}, "spec.sink", "must be pull: {} with source"),
    Bad("spec.runtime", "Sidecar", "spec.runtime", "must be InProcess: the others are not in this release"),
    Bad("spec.concurrency", 0, "spec.concurrency", "1", "greater than or equal to 1"),
    Bad("spec.partitions", 16, "spec.partitions", "the broker has partitions of its own"),
    Bad("spec.ordering", "None", "spec.ordering", "must be Key with source"),
    Bad("spec.start", {"from": "Position", "position": 5}, "spec.start.from", "must be Earliest or Latest"),
    Bad("spec.filter.tags.allOf", ["eu"], "spec.filter.tags", "messages of a broker have no tags"),
    Bad("spec.format", "Raw", "spec.format", "consumers recognise the format of each message"),
    Bad("spec.delivery.batchSize", 5, "spec.delivery.batchSize", "is for relayRef only"),
    Bad("spec.delivery.groupBy", ["tenant"], "spec.delivery.groupBy", "is for relayRef only"),
    Bad("spec.delivery.onExhausted", "Block", "spec.delivery.onExhausted", "must be DeadLetter with source"),
    Bad("spec.delivery.deadLetter.topic", "orders", "spec.delivery.deadLetter.topic", "is the topic of the sink or"),
    Bad("spec.delivery.deadLetter.topic", "a b", "spec.delivery.deadLetter.topic", "is not a valid Kafka topic"),
    Bad(
        "spec.delivery.deadLetter.stopAt",
        {},
        "spec.delivery.deadLetter.stopAt.consecutive",
        "is required",
        "Required value",
    ),
    Bad("spec.idempotency", {}, "spec.idempotency", "needs exactly one of redis and postgres"),
    Bad(
        "spec.idempotency",
        {"redis": {"url": "redis://h"}, "postgres": {"url": "postgresql://h/d"}},
        "spec.idempotency",
        "has redis and postgres",
    ),
    Bad("spec.idempotency.redis", {}, "spec.idempotency.redis", "needs urlSecretRef"),
    Bad("spec.idempotency.postgres", {}, "spec.idempotency.postgres", "needs urlSecretRef"),
    Bad(
        "spec.idempotency.redis",
        {"url": "redis://h", "prefix": "a b"},
        "spec.idempotency.redis.prefix",
        "is not a prefix of keys",
    ),
    Bad(
        "spec.idempotency",
        {"redis": {"url": "redis://h"}, "ttl": "1s"},
        "spec.idempotency.ttl",
        "must be between 1m",
        "must be a duration between 1m and 87600h (units: h, m, s, ms, us, ns)",
    ),
    Bad(
        "spec.idempotency",
        {"redis": {"url": "redis://h"}, "onUnavailable": "Skip"},
        "spec.idempotency.onUnavailable",
        "must be one of Wait, Handle",
        'supported values: "Wait", "Handle"',
    ),
]
