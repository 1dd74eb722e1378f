"""Manifests with one invalid field each, and the messages that refuse them.

One table for both validators: the models, used by the CLI and the operator, and the API server.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, NamedTuple

from support.manifests import consumed, event_subscription, kafka_sink, outbox_relay

RELAY = outbox_relay(namespace=None)
SUBSCRIPTION = event_subscription("out", kafka_sink(), namespace=None)
CONSUMED = consumed(namespace=None)
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
    what: str
    """Text of the model's message."""
    server: str | Later = ""
    """Text of the API server's message, if it differs."""
    at: str = ""
    """The field in the message, if it is not ``path``: what follows ``path``, or a path of its own."""

    @property
    def where(self) -> str:
        """The field in the message."""
        return self.at if self.at.startswith("spec") else self.path + self.at


def of_type(expected: str, found: str) -> str:
    return f'must be of type {expected}: "{found}"'


def one_of(*values: str) -> str:
    return "supported values: " + ", ".join(f'"{value}"' for value in values)


def between(shortest: str, longest: str) -> str:
    return f"must be a duration between {shortest} and {longest} (units: h, m, s, ms, us, ns)"


_RELAY: list[Bad] = [
    Bad("spec", REMOVED, "is required: What the relay should be.", "Required value"),
    Bad("spec.database", REMOVED, "is required: The database that holds the outbox", "Required value"),
    Bad("spec.database", {}, "needs urlSecretRef: {name: ..., key: ...} (or url, if it holds no password)"),
    Bad(
        "spec.database.url",
        "postgresql://h/db",
        "has both url and urlSecretRef: remove one of them",
        at="spec.database",
    ),
    Bad("spec.database", {"url": "postgresql://u:pw@h/db"}, "holds a password: put the URL in a Secret", at=".url"),
    Bad("spec.database", {"url": "mysql://h/db"}, "must begin with postgresql:// or postgres://", at=".url"),
    Bad("spec.database", {"url": "host=h dbname=d"}, "must begin with postgresql:// or postgres://", at=".url"),
    Bad("spec.database.urlSecretRef.key", "..", "is not a key of a Secret"),
    Bad("spec.database.urlSecretRef.key", "a/b", "is not a key of a Secret"),
    Bad("spec.database.urlSecretRef.name", "../x", "is not a valid name"),
    Bad("spec.database.urlSecretRef.key", REMOVED, "is required: Key inside the Secret", "Required value"),
    Bad(
        "spec.database.pooler",
        "PgBouncer",
        "must be one of Auto, Direct, Transaction",
        one_of("Auto", "Direct", "Transaction"),
    ),
    Bad("spec.outbox.tracking", "Rows", 'must be Log, not "Rows"', one_of("Log")),
    Bad("spec.outbox.table", "outbox", 'must be schema.table, like "public.outbox"'),
    Bad("spec.outbox.table", "Shop.Outbox", "must be schema.table"),
    Bad("spec.outbox.table", "a.b; drop table c", "must be schema.table"),
    Bad("spec.outbox.columns.id", 'a"b', "is not a column name"),
    Bad("spec.outbox.manageSchema", "yes", "must be true or false, not a string", of_type("boolean", "string")),
    Bad("spec.outbox.retention.policy", "Drop", "Drop needs a limit: set maxAge or maxBytes"),
    Bad("spec.outbox.retention.maxAge", "900h", "has no effect with policy Hold"),
    Bad("spec.outbox.retention.maxBytes", "10Gi", "has no effect with policy Hold"),
    Bad(
        "spec.outbox.retention",
        {"policy": "Drop", "maxAge": "24h"},
        "is 24h, shorter than after (720h): raise it or lower after",
        at=".maxAge",
    ),
    Bad("spec.outbox.retention", {"policy": "Drop", "maxBytes": 0}, "more than 0", at=".maxBytes"),
    Bad("spec.outbox.retention", {"policy": "Drop", "maxBytes": "1GB"}, "not a size", at=".maxBytes"),
    Bad(
        "spec.outbox.retention",
        {"policy": "Drop", "maxBytes": []},
        "must be a size",
        of_type("integer,string", "array"),
        at=".maxBytes",
    ),
    Bad("spec.outbox.retention.after", "30d", 'write "720h"', between("1m", "87600h")),
    Bad("spec.outbox.retention.after", "1s", "must be between 1m and 87600h, not 1s", between("1m", "87600h")),
    Bad(
        "spec.outbox.durability",
        "Fsynced",
        "must be one of Committed, Flushed, Replicated",
        one_of("Committed", "Flushed", "Replicated"),
    ),
    Bad("spec.runtime", "sidecar", "must be one of Deployment, Sidecar", one_of("Deployment", "Sidecar")),
    Bad("spec.replicas", -1, "must be at least 0, not -1", "should be greater than or equal to 0"),
    Bad("spec.replicas", 2.5, "must be a whole number, not a number", of_type("integer", "number")),
    Bad("spec.replicas", True, "must be a whole number, not a boolean", of_type("integer", "boolean")),
    Bad(
        "spec.wake.notify",
        False,
        "must be one of Auto, Always, Never, not a boolean (YAML reads",
        of_type("string", "boolean"),
    ),
    Bad("spec.wake.pollInterval", 5, "a duration needs a unit", of_type("string", "integer")),
    Bad("spec.wake.pollInterval", True, "must be a duration", of_type("string", "boolean")),
    Bad(
        "spec.wake.pollInterval",
        "2m",
        "is 2m, longer than maxIdleInterval (1m)",
        "is 2m, longer than maxIdleInterval (60s): make it shorter or raise maxIdleInterval",
    ),
    Bad("spec.wake.idleAfter", 0, "must be at least 1, not 0", "should be greater than or equal to 1"),
    Bad("spec.wake.maxIdleInterval", "2h", "must be between 1ms and 1h, not 2h", between("1ms", "1h")),
    Bad("spec.template.env", [{"name": "A B"}], "is not the name of an environment variable", at="[0].name"),
    Bad("spec.template.env", [{"name": "PGPASSWORD", "value": "x"}], "is a secret", at="[0].value"),
    Bad("spec.template.env", [{"name": "A", "value": "", "valueFrom": {}}], "both value and valueFrom", at="[0]"),
    Bad("spec.template.resources.limits", {"memory": "5GB"}, 'is not a quantity: write it like "500m"', at=".memory"),
    Bad(
        "spec.template.tolerations",
        [{"effect": "No"}],
        "must be one of NoSchedule",
        one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        at="[0].effect",
    ),
    Bad(
        "spec.template.labels",
        {"a": 1},
        "must be a string, not a number: put it in quotes",
        of_type("string", "integer"),
        at=".a",
    ),
    Bad(
        "spec.database.urlSecretRef",
        "orders-db",
        "must be a mapping, not a string: write {name: ..., key: ...}",
        of_type("object", "string"),
    ),
    Bad(
        "spec.spec",
        {"replicas": 2},
        "stands inside spec itself: move what is in it up by one level",
        'unknown field "spec.spec"',
    ),
    Bad("spec.template", [], "must be a mapping, not a list", of_type("object", "array")),
    Bad("metadata", REMOVED, "is required: Who the resource is", "Required value: name or generateName is required"),
    Bad(
        "metadata.name",
        REMOVED,
        "is required: Name of the resource",
        "Required value: name or generateName is required",
    ),
    Bad("metadata.name", 5, "must be a string, not a number: put it in quotes", "cannot unmarshal number"),
    Bad("metadata.name", "Orders", "is not a valid name: use lower-case letters, digits and -"),
    Bad("metadata.name", "2nd-orders", "must begin with a letter: a Service is named after it"),
    Bad("metadata.name", "-a", "is not a valid name"),
    Bad("metadata.name", "a.b", "is not a valid name"),
    Bad("metadata.name", "a" * 64, "is too long: at most 63 characters", "is too long: at most 57 characters"),
    Bad("metadata.name", "orders\n", "is not a valid name"),
    Bad("metadata.namespace", "My Shop", "is not a valid name", "namespace of the provided object does not match"),
    Bad("metadata.lables", {}, "unknown field, did you mean labels?", 'unknown field "metadata.lables"'),
]

KAFKA = "spec.sink.kafka"
_SUBSCRIPTION: list[Bad] = [
    Bad("spec.relayRef", REMOVED, "needs relayRef: {name: ...} to read an outbox, or source", at="spec"),
    Bad("spec.runtime", "InProcess", "is for source only"),
    Bad("spec.concurrency", 8, "is for source only"),
    Bad("spec.delivery.deadLetter", {"topic": "d", "stopAt": {"consecutive": 9}}, "is for source only", at=".stopAt"),
    Bad(
        "spec.state",
        "Runing",
        'must be one of Running, Paused, not "Runing"; did you mean Running?',
        one_of("Running", "Paused"),
    ),
    Bad("spec.filter.eventTypes", ["a", "b[c]"], "character classes ([...]) are not supported", at="[1]"),
    Bad("spec.filter.eventTypes", [""], "an empty pattern matches nothing", at="[0]"),
    Bad("spec.filter.eventTypes", [7], "must be a pattern: put it in quotes", of_type("string", "integer"), at="[0]"),
    Bad(
        "spec.filter.eventTypes",
        "order.*",
        "must be a list, not a string: put it in brackets",
        of_type("array", "string"),
    ),
    Bad("spec.filter.eventTypes", ["a"] * 257, "takes at most 256 items", "Too many: 257: must have at most 256 items"),
    Bad("spec.filter.tags", {"allOf": ["a"], "noneOf": ["a"]}, '"a" is in allOf too', at=".noneOf"),
    Bad("spec.filter.tags", {"anyOf": ["a"], "noneOf": ["a"]}, "holds every tag of anyOf", at=".noneOf"),
    Bad("spec.filter.tags.anyOf", [""], "must not be empty", at="[0]"),
    Bad("spec.partitions", 0, "must be at least 1, not 0", "should be greater than or equal to 1"),
    Bad("spec.partitions", 257, "must be at most 256, not 257", "should be less than or equal to 256"),
    Bad(
        "spec.partitions",
        "8",
        "must be a whole number, not a string: write it without quotes",
        of_type("integer", "string"),
    ),
    Bad("spec.ordering", "Strict", "must be one of Key, None", one_of("Key", "None")),
    Bad(
        "spec.start.from",
        "Beginning",
        "must be one of Earliest, Latest, Time, Position",
        one_of("Earliest", "Latest", "Time", "Position"),
    ),
    Bad(
        "spec.start.from",
        "Time",
        'is required with from: Time: write time: "2026-01-31T12:00:00Z"',
        at="spec.start.time",
    ),
    Bad(
        "spec.start.from",
        "Position",
        "is required with from: Position: write position: 12345",
        at="spec.start.position",
    ),
    Bad("spec.start.position", 5, "is for from: Position only, not Earliest: change from or remove it"),
    Bad(
        "spec.start",
        {"from": "Position", "position": 5, "time": "2026-01-31T12:00:00Z"},
        "is for from: Time only, not Position",
        at=".time",
    ),
    Bad("spec.start", {"from": "Time", "time": "2026-01-31"}, "must be a date, a time and a zone", at=".time"),
    Bad("spec.start", {"from": "Time", "time": "2026-01-31T12:00:00"}, "must be a date, a time and a zone", at=".time"),
    Bad("spec.start", {"from": "Time", "time": date(2026, 1, 31)}, "must be a date, a time and a zone", at=".time"),
    Bad("spec.start", {"from": "Time", "time": datetime(2026, 1, 31)}, "and a zone", at=".time"),  # noqa: DTZ001
    Bad(
        "spec.start",
        {"from": "Time", "time": 1700000000},
        "must be a date, a time and a zone",
        of_type("string", "integer"),
        at=".time",
    ),
    Bad(
        "spec.start",
        {"from": "Time", "time": "0001-01-01T00:00:00+05:00"},
        "between the years 1 and 9999",
        "must be a date, a time and a zone",
        at=".time",
    ),
    Bad(
        "spec.start",
        {"from": "Time", "time": "2026-02-30T00:00:00Z"},
        "day value is outside expected range",
        "must be a date, a time and a zone",
        at=".time",
    ),
    Bad(
        "spec.start",
        {"from": "Position", "position": -1},
        "must be at least 0, not -1",
        "should be greater than or equal to 0",
        at=".position",
    ),
    Bad("spec.sink", REMOVED, "is required: Where events go", "Required value"),
    Bad("spec.sink", {}, "needs exactly one of kafka, pubsub, log, custom, pull"),
    Bad("spec.sink", {"log": None}, "(one without settings is written log: {})"),
    Bad(
        "spec.sink.log",
        {},
        "has kafka and log: keep one",
        "has kafka, log, more than one: keep one, and give each other one a subscription of its own",
        at="spec.sink",
    ),
    Bad(f"{KAFKA}.bootstrapServers", [], "needs at least 1 item", "should have at least 1 items"),
    Bad(f"{KAFKA}.bootstrapServers", "kafka:9092", "must be a list, not a string", of_type("array", "string")),
    Bad(f"{KAFKA}.bootstrapServers", ["kafka"], "must be host:port", at="[0]"),
    Bad(f"{KAFKA}.bootstrapServers", ["SASL_SSL://k:9"], "without a protocol before it", at="[0]"),
    Bad(f"{KAFKA}.topic", "a b", "is not a valid Kafka topic"),
    Bad(f"{KAFKA}.topic", "..", "is not a valid Kafka topic"),
    Bad(f"{KAFKA}.topic", "a" * 250, "is too long: at most 249 characters", "Too long: may not be more than 249 bytes"),
    Bad(
        f"{KAFKA}.config",
        {"linger.ms": 5},
        "must be a string, not a number: put it in quotes",
        of_type("string", "integer"),
        at='["linger.ms"]',
    ),
    Bad(
        f"{KAFKA}.config",
        {"sasl.password": "hunter2"},
        "is a secret and must not be written here: put it in a Secret and refer to it by configSecretRef: {name: ...}",
        at='["sasl.password"]',
    ),
    Bad(f"{KAFKA}.config", {"ssl.key.password": "x"}, "is a secret", at='["ssl.key.password"]'),
    *(
        Bad(f"{KAFKA}.config", {name: "x"}, "a subscription may set", at=f'["{name}"]')
        for name in ("sasl.kerberos.kinit.cmd", "ssl.ca.location", "plugin.library.paths", "enable.idempotence")
    ),
    Bad(f"{KAFKA}.config", {"linger.msec": "x"}, "a subscription may set", at='["linger.msec"]'),
    Bad(
        f"{KAFKA}.configSecretRef",
        {"name": "x", "key": "y"},
        "unknown field, known here: name",
        'unknown field "spec.sink.kafka.configSecretRef.key"',
        at=".key",
    ),
    Bad("spec.sink", {"pubsub": {"project": "acme"}}, "is required", "Required value", at=".pubsub.topic"),
    Bad("spec.sink", {"pubsub": {"project": "Acme Inc", "topic": "orders"}}, "not a project id", at=".pubsub.project"),
    Bad(
        "spec.sink", {"pubsub": {"project": "acme", "topic": "goog-x"}}, "not a valid Pub/Sub topic", at=".pubsub.topic"
    ),
    Bad("spec.sink", {"pubsub": {"project": "acme", "topic": "ab"}}, "not a valid Pub/Sub topic", at=".pubsub.topic"),
    Bad(
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "projects/acme/topics/orders"}},
        'without "projects/.../topics/"',
        at=".pubsub.topic",
    ),
    Bad(
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "orders", "endpoint": "http://x"}},
        "must be host:port",
        at=".pubsub.endpoint",
    ),
    Bad(
        "spec.sink",
        {"log": {"file": "x"}},
        "unknown field, known here: path",
        'unknown field "spec.sink.log.file"',
        at=".log.file",
    ),
    Bad(
        "spec.sink",
        {"custom": {}},
        "is required: Name that the sink's package registers",
        "Required value",
        at=".custom.type",
    ),
    Bad("spec.sink", {"custom": {"type": "a b"}}, "is not the name of a sink", at=".custom.type"),
    Bad(
        "spec.sink",
        {"custom": {"type": "nats", "config": {"auth": {"token": "x"}}}},
        "is a secret",
        Later("a rule can't validate a field without a schema"),
        at='.custom.config["auth.token"]',
    ),
    Bad(
        "spec.sink", {"kafak": {}}, "unknown field, did you mean kafka?", 'unknown field "spec.sink.kafak"', at=".kafak"
    ),
    Bad(
        "spec.format",
        "JSON",
        "must be one of CloudEvents, CloudEventsJson, Outbox, Raw",
        one_of("CloudEvents", "CloudEventsJson", "Outbox", "Raw"),
    ),
    Bad("spec.delivery.groupBy", ["tenant"], "is for sink: {pull: {}} only: remove it"),
    Bad("spec.delivery.batchSize", 0, "must be at least 1, not 0", "should be greater than or equal to 1"),
    Bad("spec.delivery.batchSize", 10_001, "must be at most 10000, not 10001", "should be less than or equal to 10000"),
    Bad("spec.delivery.maxAttempts", 0, "must be at least 1, not 0", "should be greater than or equal to 1"),
    Bad("spec.delivery.maxAttempts", 1001, "must be at most 1000, not 1001", "should be less than or equal to 1000"),
    Bad("spec.delivery.timeout", "500ms", "must be between 1s and 10m, not 500ms", between("1s", "10m")),
    Bad("spec.delivery.timeout", "11m", "must be between 1s and 10m, not 11m", between("1s", "10m")),
    Bad("spec.delivery.backoff.factor", 0.5, "must be at least 1, not 0.5", "should be greater than or equal to 1"),
    Bad("spec.delivery.backoff.factor", "2", "must be a number, not a string", of_type("number", "string")),
    Bad("spec.delivery.backoff.jitter", 1.5, "must be at most 1, not 1.5", "should be less than or equal to 1"),
    Bad("spec.delivery.backoff.jitter", -0.1, "must be at least 0, not -0.1", "should be greater than or equal to 0"),
    Bad("spec.delivery.backoff.jitter", math.nan, "must be a finite number", Later("JSON has no such number")),
    Bad(
        "spec.delivery.backoff.initial",
        "2m",
        "is 2m, longer than max (1m)",
        "is 2m, longer than max (60s): make it shorter or raise max",
    ),
    Bad("spec.delivery.onExhausted", "Deadletter", "did you mean DeadLetter?", one_of("DeadLetter", "Block")),
    Bad("spec.delivery.deadLetter", {}, "is required with relayRef", at=".topic"),
    Bad("spec.delivery.deadLetter.topic", "a b", "is not a valid Kafka topic"),
    Bad("spec.delivery.deadLetter.topic", "orders", "is the topic of the sink or source"),
    Bad("spec.idempotency", {"redis": {"url": "redis://h"}}, "is for source only"),
    Bad("spec.delivery.backof", {}, "unknown field, did you mean backoff?", 'unknown field "spec.delivery.backof"'),
    Bad(
        "spec.delivery.batch_size",
        5,
        "unknown field, did you mean batchSize?",
        'unknown field "spec.delivery.batch_size"',
    ),
    Bad(
        "spec.delivery.deadletter",
        {},
        "unknown field, did you mean deadLetter?",
        'unknown field "spec.delivery.deadletter"',
    ),
    Bad(
        "spec.batchSize",
        5,
        "unknown field here, it belongs in spec.delivery.batchSize",
        'unknown field "spec.batchSize"',
    ),
    Bad("spec.nonsense", 5, "unknown field, known here: relayRef, source, runtime", 'unknown field "spec.nonsense"'),
    Bad("spce", {}, "unknown field, did you mean spec?", 'unknown field "spce"'),
]

SOURCE = "spec.source.kafka"
PUBSUB_SOURCE = {"pubsub": {"project": "acme", "subscription": "orders"}}
_CONSUMED: list[Bad] = [
    Bad("spec.sink.pull.emitDeadLetters", True, "is for relayRef only, consumers of a broker have delivery.deadLetter"),
    Bad("spec.relayRef", {"name": "orders"}, "has both relayRef and source", at="spec"),
    Bad("spec.source", {}, "needs exactly one of kafka and pubsub"),
    Bad("spec.source.pubsub", PUBSUB_SOURCE["pubsub"], "has kafka and pubsub", at="spec.source"),
    Bad(
        "spec.source",
        {"pubsub": {"project": "acme", "subscription": "a b"}},
        "is not a valid Pub/Sub subscription",
        at=".pubsub.subscription",
    ),
    Bad(f"{SOURCE}.group", "a b", "is not the name of a consumer group"),
    Bad(f"{SOURCE}.groupProtocol", "KIP848", "must be one of Classic, Consumer", one_of("Classic", "Consumer")),
    Bad(
        f"{SOURCE}.config",
        {"group.id": "x"},
        "it has a field of its own, spec.source.kafka.group",
        "group.id is none of the librdkafka settings",
        at='["group.id"]',
    ),
    Bad(f"{SOURCE}.config", {"sasl.password": "x"}, "is a secret and must not be written here", at='["sasl.password"]'),
    Bad("spec.sink", {"log": {}}, "must be pull: {} with source"),
    Bad("spec.runtime", "Sidecar", 'must be InProcess, not "Sidecar"', one_of("InProcess")),
    Bad("spec.concurrency", 0, "1", "greater than or equal to 1"),
    Bad("spec.partitions", 16, "the broker has partitions of its own"),
    Bad("spec.ordering", "None", "must be Key with source"),
    Bad("spec.start", {"from": "Position", "position": 5}, "must be Earliest or Latest", at=".from"),
    Bad("spec.filter.tags.allOf", ["eu"], "messages of a broker have no tags", at="spec.filter.tags"),
    Bad("spec.format", "Raw", "consumers recognise the format of each message"),
    Bad("spec.delivery.batchSize", 5, "is for relayRef only"),
    Bad("spec.delivery.groupBy", ["tenant"], "is for relayRef only"),
    Bad("spec.delivery.onExhausted", "Block", "must be DeadLetter with source"),
    Bad("spec.delivery.deadLetter.topic", "orders", "is the topic of the sink or"),
    Bad("spec.delivery.deadLetter.topic", "a b", "is not a valid Kafka topic"),
    Bad("spec.delivery.deadLetter.stopAt", {}, "is required", "Required value", at=".consecutive"),
    Bad("spec.idempotency", {}, "needs exactly one of redis and postgres"),
    Bad(
        "spec.idempotency",
        {"redis": {"url": "redis://h"}, "postgres": {"url": "postgresql://h/d"}},
        "has redis and postgres",
    ),
    Bad("spec.idempotency.redis", {}, "needs urlSecretRef"),
    Bad("spec.idempotency.postgres", {}, "needs urlSecretRef"),
    Bad("spec.idempotency.redis", {"url": "redis://h", "prefix": "a b"}, "is not a prefix of keys", at=".prefix"),
    Bad(
        "spec.idempotency",
        {"redis": {"url": "redis://h"}, "ttl": "1s"},
        "must be between 1m",
        between("1m", "87600h"),
        at=".ttl",
    ),
    Bad(
        "spec.idempotency",
        {"redis": {"url": "redis://h"}, "onUnavailable": "Skip"},
        "must be one of Wait, Handle",
        one_of("Wait", "Handle"),
        at=".onUnavailable",
    ),
]

REFUSALS: list[tuple[dict[str, Any], Bad]] = [
    *((RELAY, bad) for bad in _RELAY),
    *((SUBSCRIPTION, bad) for bad in _SUBSCRIPTION),
    *((CONSUMED, bad) for bad in _CONSUMED),
]
"""Each invalid field with the valid manifest that it belongs to."""
