"""Every refusal, with the field it names and the sentence it says."""

from __future__ import annotations

import copy
import math
from datetime import date, datetime
from typing import Any

import pytest

from mailboat_spec import SpecError, read_documents

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
LOG: dict[str, Any] = {"log": {}}
REMOVED = object()


def changed(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of a document with one field set (mappings on the way are made), or removed."""
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


def problems(*bodies: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as refused:
        read_documents((f"document {number}", body) for number, body in enumerate(bodies, start=1))
    return [(problem.path, problem.message) for problem in refused.value.problems]


RELAY_REFUSALS: list[tuple[str, object, str, str]] = [
    ("spec", REMOVED, "spec", "is required: What the relay should be."),
    ("spec.database", REMOVED, "spec.database", "is required: The database that holds the outbox"),
    (
        "spec.database",
        {},
        "spec.database",
        "needs urlSecretRef: {name: ..., key: ...} (or url, if it holds no password)",
    ),
    ("spec.database.url", "postgresql://h/db", "spec.database", "has both url and urlSecretRef: remove one of them"),
    (
        "spec.database",
        {"url": "postgresql://u:pw@h/db"},
        "spec.database.url",
        "holds a password: put the URL in a Secret",
    ),
    ("spec.database", {"url": "mysql://h/db"}, "spec.database.url", "must begin with postgresql:// or postgres://"),
    ("spec.database", {"url": "host=h dbname=d"}, "spec.database.url", "must begin with postgresql:// or postgres://"),
    ("spec.database.urlSecretRef.key", "..", "spec.database.urlSecretRef.key", "is not a key of a Secret"),
    ("spec.database.urlSecretRef.key", "a/b", "spec.database.urlSecretRef.key", "is not a key of a Secret"),
    ("spec.database.urlSecretRef.name", "../x", "spec.database.urlSecretRef.name", "is not a valid name"),
    ("spec.database.urlSecretRef.key", REMOVED, "spec.database.urlSecretRef.key", "is required: Key inside the Secret"),
    ("spec.database.pooler", "PgBouncer", "spec.database.pooler", "must be one of Auto, Direct, Transaction"),
    ("spec.outbox.tracking", "log", "spec.outbox.tracking", 'Log, Rows, not "log"; did you mean Log?'),
    ("spec.outbox.table", "outbox", "spec.outbox.table", 'must be schema.table, like "public.outbox"'),
    ("spec.outbox.table", "Shop.Outbox", "spec.outbox.table", "must be schema.table"),
    ("spec.outbox.table", "a.b; drop table c", "spec.outbox.table", "must be schema.table"),
    ("spec.outbox.columns.publishedAt", "sent", "spec.outbox.columns.publishedAt", "is for tracking Rows only"),
    ("spec.outbox.columns.preset", "rows", "spec.outbox.columns.preset", "rows goes with tracking Rows"),
    (
        "spec.outbox",
        {"tracking": "Rows", "columns": {"preset": "mailboat"}},
        "spec.outbox.columns.preset",
        "mailboat goes with tracking Log",
    ),
    ("spec.outbox.columns.id", 'a"b', "spec.outbox.columns.id", "is not a column name"),
    ("spec.outbox.manageSchema", "yes", "spec.outbox.manageSchema", "must be true or false, not a string"),
    (
        "spec.outbox.retention.policy",
        "Drop",
        "spec.outbox.retention.policy",
        "Drop needs a limit: set maxAge or maxBytes",
    ),
    ("spec.outbox.retention.maxAge", "900h", "spec.outbox.retention.maxAge", "has no effect with policy Hold"),
    ("spec.outbox.retention.maxBytes", "10Gi", "spec.outbox.retention.maxBytes", "has no effect with policy Hold"),
    (
        "spec.outbox.retention",
        {"policy": "Drop", "maxAge": "24h"},
        "spec.outbox.retention.maxAge",
        "is 24h, shorter than after (720h): raise it or lower after",
    ),
    ("spec.outbox.retention", {"policy": "Drop", "maxBytes": 0}, "spec.outbox.retention.maxBytes", "more than 0"),
    ("spec.outbox.retention", {"policy": "Drop", "maxBytes": "1GB"}, "spec.outbox.retention.maxBytes", "not a size"),
    ("spec.outbox.retention", {"policy": "Drop", "maxBytes": []}, "spec.outbox.retention.maxBytes", "must be a size"),
    ("spec.outbox.retention.after", "30d", "spec.outbox.retention.after", 'write "720h"'),
    ("spec.outbox.retention.after", "1s", "spec.outbox.retention.after", "must be between 1m and 87600h, not 1s"),
    ("spec.outbox.durability", "Fsynced", "spec.outbox.durability", "must be one of Committed, Flushed, Replicated"),
    ("spec.runtime", "sidecar", "spec.runtime", "must be one of Deployment, Sidecar"),
    ("spec.replicas", -1, "spec.replicas", "must be at least 0, not -1"),
    ("spec.replicas", 2.5, "spec.replicas", "must be a whole number, not a number"),
    ("spec.replicas", True, "spec.replicas", "must be a whole number, not a boolean"),
    ("spec.wake.notify", False, "spec.wake.notify", "must be one of Auto, Always, Never, not a boolean (YAML reads"),
    ("spec.wake.pollInterval", 5, "spec.wake.pollInterval", "a duration needs a unit"),
    ("spec.wake.pollInterval", True, "spec.wake.pollInterval", "must be a duration"),
    ("spec.wake.pollInterval", "2m", "spec.wake.pollInterval", "is 2m, longer than maxIdleInterval (1m)"),
    ("spec.wake.idleAfter", 0, "spec.wake.idleAfter", "must be at least 1, not 0"),
    ("spec.wake.maxIdleInterval", "2h", "spec.wake.maxIdleInterval", "must be between 1ms and 1h, not 2h"),
    ("spec.template.env", [{"name": "A B"}], "spec.template.env[0].name", "is not the name of an environment variable"),
    ("spec.template.env", [{"name": "PGPASSWORD", "value": "x"}], "spec.template.env[0].value", "is a secret"),
    (
        "spec.template.env",
        [{"name": "A", "value": "", "valueFrom": {}}],
        "spec.template.env[0]",
        "both value and valueFrom",
    ),
    (
        "spec.template.resources.limits",
        {"memory": "5GB"},
        "spec.template.resources.limits.memory",
        'is not a quantity: write it like "500m"',
    ),
    (
        "spec.template.tolerations",
        [{"effect": "No"}],
        "spec.template.tolerations[0].effect",
        "must be one of NoSchedule",
    ),
    ("spec.template.labels", {"a": 1}, "spec.template.labels.a", "must be a string, not a number: put it in quotes"),
    ("spec.template", [], "spec.template", "must be a mapping, not a list"),
    ("metadata", REMOVED, "metadata", "is required: Who the resource is"),
    ("metadata.name", REMOVED, "metadata.name", "is required: Name of the resource"),
    ("metadata.name", 5, "metadata.name", "must be a string, not a number: put it in quotes"),
    ("metadata.name", "Orders", "metadata.name", "is not a valid name: use lower-case letters, digits and -"),
    ("metadata.name", "-a", "metadata.name", "is not a valid name"),
    ("metadata.name", "a.b", "metadata.name", "is not a valid name"),
    ("metadata.name", "a" * 64, "metadata.name", "is too long: at most 63 characters"),
    ("metadata.name", "orders\n", "metadata.name", "is not a valid name"),
    ("metadata.namespace", "My Shop", "metadata.namespace", "is not a valid name"),
    ("metadata.lables", {}, "metadata.lables", "unknown field, did you mean labels?"),
]

KAFKA = "spec.sink.kafka"
SUBSCRIPTION_REFUSALS: list[tuple[str, object, str, str]] = [
    ("spec.relayRef", REMOVED, "spec.relayRef", "is required: The OutboxRelay whose outbox is read."),
    ("spec.state", "Runing", "spec.state", 'must be one of Running, Paused, not "Runing"; did you mean Running?'),
    (
        "spec.filter.eventTypes",
        ["a", "b[c]"],
        "spec.filter.eventTypes[1]",
        "character classes ([...]) are not supported",
    ),
    ("spec.filter.eventTypes", [""], "spec.filter.eventTypes[0]", "an empty pattern matches nothing"),
    ("spec.filter.eventTypes", [7], "spec.filter.eventTypes[0]", "must be a pattern: put it in quotes"),
    ("spec.filter.eventTypes", "order.*", "spec.filter.eventTypes", "must be a list, not a string: put it in brackets"),
    ("spec.filter.eventTypes", ["a"] * 257, "spec.filter.eventTypes", "takes at most 256 items"),
    ("spec.filter.tags", {"allOf": ["a"], "noneOf": ["a"]}, "spec.filter.tags.noneOf", '"a" is in allOf too'),
    ("spec.filter.tags", {"anyOf": ["a"], "noneOf": ["a"]}, "spec.filter.tags.noneOf", "holds every tag of anyOf"),
    ("spec.filter.tags.anyOf", [""], "spec.filter.tags.anyOf[0]", "must not be empty"),
    ("spec.partitions", 0, "spec.partitions", "must be at least 1, not 0"),
    ("spec.partitions", 257, "spec.partitions", "must be at most 256, not 257"),
    ("spec.partitions", "8", "spec.partitions", "must be a whole number, not a string: write it without quotes"),
    ("spec.ordering", "Strict", "spec.ordering", "must be one of Key, None"),
    ("spec.start.from", "Beginning", "spec.start.from", "must be one of Earliest, Latest, Time, Position"),
    ("spec.start.from", "Time", "spec.start.time", 'is required with from: Time: write time: "2026-01-31T12:00:00Z"'),
    ("spec.start.from", "Position", "spec.start.position", "is required with from: Position: write position: 12345"),
    (
        "spec.start.position",
        5,
        "spec.start.position",
        "is for from: Position only, not Earliest: change from or remove it",
    ),
    (
        "spec.start",
        {"from": "Position", "position": 5, "time": "2026-01-31T12:00:00Z"},
        "spec.start.time",
        "is for from: Time only, not Position",
    ),
    ("spec.start", {"from": "Time", "time": "2026-01-31"}, "spec.start.time", "must be a date, a time and a zone"),
    (
        "spec.start",
        {"from": "Time", "time": "2026-01-31T12:00:00"},
        "spec.start.time",
        "must be a date, a time and a zone",
    ),
    ("spec.start", {"from": "Time", "time": date(2026, 1, 31)}, "spec.start.time", "must be a date, a time and a zone"),
    ("spec.start", {"from": "Time", "time": datetime(2026, 1, 31)}, "spec.start.time", "and a zone"),  # noqa: DTZ001
    ("spec.start", {"from": "Time", "time": 1700000000}, "spec.start.time", "must be a date, a time and a zone"),
    (
        "spec.start",
        {"from": "Time", "time": "0001-01-01T00:00:00+05:00"},
        "spec.start.time",
        "between the years 1 and 9999",
    ),
    (
        "spec.start",
        {"from": "Time", "time": "2026-02-30T00:00:00Z"},
        "spec.start.time",
        "day value is outside expected range",
    ),
    ("spec.start", {"from": "Position", "position": -1}, "spec.start.position", "must be at least 0, not -1"),
    ("spec.sink", REMOVED, "spec.sink", "is required: Where events go"),
    ("spec.sink", {}, "spec.sink", "needs exactly one of kafka, pubsub, http, redis, postgres, log, custom"),
    ("spec.sink", {"log": None}, "spec.sink", "(one without settings is written log: {})"),
    ("spec.sink.log", {}, "spec.sink", "has kafka and log: keep one"),
    (f"{KAFKA}.bootstrapServers", [], f"{KAFKA}.bootstrapServers", "needs at least 1 item"),
    (f"{KAFKA}.bootstrapServers", "kafka:9092", f"{KAFKA}.bootstrapServers", "must be a list, not a string"),
    (f"{KAFKA}.bootstrapServers", ["kafka"], f"{KAFKA}.bootstrapServers[0]", "must be host:port"),
    (f"{KAFKA}.bootstrapServers", ["SASL_SSL://k:9"], f"{KAFKA}.bootstrapServers[0]", "without a protocol before it"),
    (f"{KAFKA}.topic", "a b", f"{KAFKA}.topic", "is not a valid Kafka topic"),
    (f"{KAFKA}.topic", "..", f"{KAFKA}.topic", "is not a valid Kafka topic"),
    (f"{KAFKA}.topic", "a" * 250, f"{KAFKA}.topic", "is too long: at most 249 characters"),
    (
        f"{KAFKA}.config",
        {"linger.ms": 5},
        f'{KAFKA}.config["linger.ms"]',
        "must be a string, not a number: put it in quotes",
    ),
    (
        f"{KAFKA}.config",
        {"sasl.password": "hunter2"},
        f'{KAFKA}.config["sasl.password"]',
        "is a secret and must not be written here: put it in a Secret and refer to it by configSecretRef: {name: ...}",
    ),
    (f"{KAFKA}.config", {"ssl.key.password": "x"}, f'{KAFKA}.config["ssl.key.password"]', "is a secret"),
    (
        f"{KAFKA}.configSecretRef",
        {"name": "x", "key": "y"},
        f"{KAFKA}.configSecretRef.key",
        "unknown field, known here: name",
    ),
    ("spec.sink", {"pubsub": {"project": "acme"}}, "spec.sink.pubsub.topic", "is required"),
    (
        "spec.sink",
        {"pubsub": {"project": "Acme Inc", "topic": "orders"}},
        "spec.sink.pubsub.project",
        "not a project id",
    ),
    (
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "goog-x"}},
        "spec.sink.pubsub.topic",
        "not a valid Pub/Sub topic",
    ),
    (
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "ab"}},
        "spec.sink.pubsub.topic",
        "not a valid Pub/Sub topic",
    ),
    (
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "projects/acme/topics/orders"}},
        "spec.sink.pubsub.topic",
        'without "projects/.../topics/"',
    ),
    (
        "spec.sink",
        {"pubsub": {"project": "acme", "topic": "orders", "endpoint": "http://x"}},
        "spec.sink.pubsub.endpoint",
        "must be host:port",
    ),
    ("spec.sink", {"http": {"url": "ftp://h/"}}, "spec.sink.http.url", "must begin with https:// or http://"),
    ("spec.sink", {"http": {"url": "https://u:p@h/"}}, "spec.sink.http.url", "holds a password"),
    ("spec.sink", {"http": {}}, "spec.sink.http", "needs urlSecretRef"),
    (
        "spec.sink",
        {"http": {"url": "https://h/", "headers": {"Authorization": "Bearer x"}}},
        "spec.sink.http.headers.Authorization",
        "refer to it by headersSecretRef",
    ),
    ("spec.sink", {"redis": {"url": "redis://:pw@h", "stream": "s"}}, "spec.sink.redis.url", "holds a password"),
    ("spec.sink", {"redis": {"url": "redis://h"}}, "spec.sink.redis.stream", "is required"),
    ("spec.sink", {"postgres": {"url": "postgresql://h/d", "table": "t"}}, "spec.sink.postgres.table", "schema.table"),
    ("spec.sink", {"log": {"file": "x"}}, "spec.sink.log.file", "unknown field, known here: path"),
    ("spec.sink", {"custom": {}}, "spec.sink.custom.type", "is required: Name that the sink's package registers"),
    ("spec.sink", {"custom": {"type": "a b"}}, "spec.sink.custom.type", "is not the name of a sink"),
    (
        "spec.sink",
        {"custom": {"type": "nats", "config": {"auth": {"token": "x"}}}},
        'spec.sink.custom.config["auth.token"]',
        "is a secret",
    ),
    ("spec.sink", {"kafak": {}}, "spec.sink.kafak", "unknown field, did you mean kafka?"),
    ("spec.format", "JSON", "spec.format", "must be one of CloudEvents, CloudEventsJson, Raw"),
    ("spec.schemas", {"configMapRef": {}}, "spec.schemas.configMapRef.name", "is required: Name of the ConfigMap"),
    ("spec.delivery.batchSize", 0, "spec.delivery.batchSize", "must be at least 1, not 0"),
    ("spec.delivery.batchSize", 10_001, "spec.delivery.batchSize", "must be at most 10000, not 10001"),
    ("spec.delivery.maxAttempts", 0, "spec.delivery.maxAttempts", "must be at least 1, not 0"),
    ("spec.delivery.maxAttempts", 1001, "spec.delivery.maxAttempts", "must be at most 1000, not 1001"),
    ("spec.delivery.timeout", "500ms", "spec.delivery.timeout", "must be between 1s and 10m, not 500ms"),
    ("spec.delivery.timeout", "11m", "spec.delivery.timeout", "must be between 1s and 10m, not 11m"),
    ("spec.delivery.backoff.factor", 0.5, "spec.delivery.backoff.factor", "must be at least 1, not 0.5"),
    ("spec.delivery.backoff.factor", "2", "spec.delivery.backoff.factor", "must be a number, not a string"),
    ("spec.delivery.backoff.jitter", 1.5, "spec.delivery.backoff.jitter", "must be at most 1, not 1.5"),
    ("spec.delivery.backoff.jitter", -0.1, "spec.delivery.backoff.jitter", "must be at least 0, not -0.1"),
    ("spec.delivery.backoff.jitter", math.nan, "spec.delivery.backoff.jitter", "must be a finite number"),
    ("spec.delivery.backoff.initial", "2m", "spec.delivery.backoff.initial", "is 2m, longer than max (1m)"),
    ("spec.delivery.onExhausted", "Deadletter", "spec.delivery.onExhausted", "did you mean DeadLetter?"),
    ("spec.delivery.deadLetter", {}, "spec.delivery.deadLetter.topic", "is required: Topic"),
    ("spec.delivery.deadLetter.topic", "a b", "spec.delivery.deadLetter.topic", "is not a valid Kafka topic"),
    ("spec.delivery.deadLetter.topic", "orders", "spec.delivery.deadLetter.topic", "is the sink's own topic"),
    ("spec.idempotency", {}, "spec.idempotency.redis", "is required"),
    ("spec.idempotency.redis", {}, "spec.idempotency.redis", "needs urlSecretRef"),
    ("spec.idempotency", {"redis": {"url": "redis://h"}, "ttl": "1s"}, "spec.idempotency.ttl", "must be between 1m"),
    ("spec.delivery.backof", {}, "spec.delivery.backof", "unknown field, did you mean backoff?"),
    ("spec.delivery.batch_size", 5, "spec.delivery.batch_size", "unknown field, did you mean batchSize?"),
    ("spec.delivery.deadletter", {}, "spec.delivery.deadletter", "unknown field, did you mean deadLetter?"),
    ("spec.batchSize", 5, "spec.batchSize", "unknown field here, it belongs in spec.delivery.batchSize"),
    ("spec.nonsense", 5, "spec.nonsense", "unknown field, known here: relayRef, state, filter"),
    ("spce", {}, "spce", "unknown field, did you mean spec?"),
]


@pytest.mark.parametrize(("path", "value", "where", "what"), RELAY_REFUSALS)
def test_a_relay_is_refused(path: str, value: object, where: str, what: str) -> None:
    ((found, message),) = problems(changed(RELAY, path, value))
    assert found == where
    assert what in message


@pytest.mark.parametrize(("path", "value", "where", "what"), SUBSCRIPTION_REFUSALS)
def test_a_subscription_is_refused(path: str, value: object, where: str, what: str) -> None:
    ((found, message),) = problems(RELAY, changed(SUBSCRIPTION, path, value))
    assert found == where
    assert what in message


def test_a_sidecar_with_replicas_is_refused() -> None:
    body = changed(changed(RELAY, "spec.runtime", "Sidecar"), "spec.replicas", 2)
    ((where, what),) = problems(body)
    assert where == "spec.replicas"
    assert what == "a Sidecar has no replicas of its own, it runs in the application's pods: remove it"


@pytest.mark.parametrize("kind", ["http", "postgres"])
def test_a_dead_letter_topic_needs_a_sink_with_topics(kind: str) -> None:
    sinks = {"http": {"url": "https://h/"}, "postgres": {"url": "postgresql://h/d", "table": "public.t"}}
    body = changed(changed(SUBSCRIPTION, "spec.sink", {kind: sinks[kind]}), "spec.delivery.deadLetter.topic", "dead")
    ((where, what),) = problems(RELAY, body)
    assert where == "spec.delivery.deadLetter"
    assert f"a sink of kind {kind} has no topics: remove it" in what


def test_a_dead_letter_topic_has_the_form_of_its_sink() -> None:
    sink = {"pubsub": {"project": "acme", "topic": "orders"}}
    body = changed(changed(SUBSCRIPTION, "spec.sink", sink), "spec.delivery.deadLetter.topic", "no")
    assert problems(RELAY, body)[0][0] == "spec.delivery.deadLetter.topic"
    sink_without_forms = changed(changed(SUBSCRIPTION, "spec.sink", LOG), "spec.delivery.deadLetter.topic", "no")
    assert read_documents([("r", RELAY), ("s", sink_without_forms)]).subscriptions[0].spec.sink.kind == "log"


def test_no_refusal_repeats_a_secret() -> None:
    secret = "hunter2-4711"
    bodies = [
        changed(RELAY, "spec.database", {"url": f"postgresql://u:{secret}@h/db"}),
        changed(RELAY, "spec.database", {"url": f"host=h password={secret}"}),
        changed(RELAY, "spec.database", {"url": "postgresql://h", "password": secret}),
        changed(RELAY, "spec.template.env", [{"name": "DB_PASSWORD", "value": secret}]),
        changed(SUBSCRIPTION, f"{KAFKA}.config", {"sasl.password": secret}),
        changed(SUBSCRIPTION, f"{KAFKA}.config", {"sasl.password": [secret]}),
        changed(SUBSCRIPTION, f"{KAFKA}.configSecretRef", secret),
        changed(SUBSCRIPTION, "spec.sink", {"http": {"url": "https://h", "headers": {"Authorization": secret}}}),
    ]
    for body in bodies:
        with pytest.raises(SpecError) as refused:
            read_documents([("document", body)])
        assert secret not in str(refused.value)
        assert secret not in repr(refused.value.problems)
