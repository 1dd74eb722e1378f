"""Parsed manifests can be written and parsed again, as JSON and as YAML, without a change."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mailboat_spec import (
    ConditionStatus,
    ConditionType,
    Duration,
    Filter,
    Manifests,
    OutboxRelay,
    OutboxRelaySpec,
    Pattern,
    Reason,
    read_documents,
)
from mailboat_spec.resources.delivery import Backoff, Delivery
from mailboat_spec.resources.relay import Database
from mailboat_spec.resources.resource import Metadata
from mailboat_spec.resources.status import Condition, EventSubscriptionStatus

Fields = dict[str, Any]


def sometimes(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Fields]:
    """A mapping in which each field may be missing."""
    return st.fixed_dictionaries({}, optional=fields)


names = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True)
words = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9
)
labels = st.dictionaries(names, words, max_size=2)
spans = st.integers(60 * 10**9, 600 * 10**9).map(lambda nanoseconds: str(Duration(nanoseconds)))
secret_keys = st.fixed_dictionaries({"name": names, "key": names})
connections = st.one_of(
    st.fixed_dictionaries({"urlSecretRef": secret_keys}), st.fixed_dictionaries({"url": st.just("postgresql://u@h/db")})
)
redis = st.one_of(st.fixed_dictionaries({"urlSecretRef": secret_keys}), st.just({"url": "redis://h:6379/0"}))
patterns = st.lists(words.filter(lambda word: "[" not in word), max_size=3)

retention = st.one_of(
    sometimes(after=spans, policy=st.just("Hold")),
    st.fixed_dictionaries({"policy": st.just("Drop"), "maxBytes": st.one_of(st.just("10Gi"), st.integers(1, 2**40))}),
    st.fixed_dictionaries({"policy": st.just("Drop"), "after": st.just("1h"), "maxAge": st.just("2h")}),
)
relay_specs = st.fixed_dictionaries(
    {"database": connections},
    optional={
        "outbox": sometimes(
            tracking=st.just("Log"),
            table=st.sampled_from(["mailboat.outbox", "public.my_outbox"]),
            columns=sometimes(preset=st.sampled_from(["mailboat", "debezium"]), payload=names),
            manageSchema=st.booleans(),
            retention=retention,
            durability=st.sampled_from(["Committed", "Flushed", "Replicated"]),
        ),
        "wake": sometimes(
            notify=st.sampled_from(["Auto", "Always", "Never"]), idleAfter=st.integers(1, 9), maxIdleInterval=spans
        ),
        "template": sometimes(
            labels=labels,
            resources=sometimes(limits=st.just({"cpu": 1, "memory": "256Mi"})),
            env=st.just([{"name": "A", "value": "b"}, {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]),
            tolerations=st.just([{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}]),
            affinity=st.just({"podAntiAffinity": {"x": [{"y": None, "z": 1}]}}),
        ),
    },
).flatmap(
    lambda spec: st.one_of(
        st.just({**spec, "runtime": "Sidecar"}), st.integers(0, 9).map(lambda replicas: {**spec, "replicas": replicas})
    )
)
sinks = st.one_of(
    st.fixed_dictionaries(
        {"bootstrapServers": st.just(["a:1", "[::1]:2"]), "topic": names},
        optional={"config": st.just({"linger.ms": "5"}), "configSecretRef": st.just({"name": "k"})},
    ).map(lambda kafka: {"kafka": kafka}),
    st.fixed_dictionaries(
        {"project": st.just("acme"), "topic": st.just("orders")}, optional={"credentialsSecretRef": secret_keys}
    ).map(lambda pubsub: {"pubsub": pubsub}),
    sometimes(path=words).map(lambda log: {"log": log}),
    st.just(
        {"custom": {"type": "nats", "config": {"servers": ["n:1"], "deep": {"a": 1}}, "configSecretRef": {"name": "n"}}}
    ),
)
times = st.datetimes(datetime(1971, 1, 1), datetime(2199, 1, 1), timezones=st.timezones()).filter(  # noqa: DTZ001
    lambda time: (time.utcoffset() or timedelta()).seconds % 60 == 0  # RFC 3339 offsets have no seconds
)
starts: st.SearchStrategy[Fields] = st.one_of(
    st.sampled_from([{}, {"from": "Earliest"}, {"from": "Latest"}]),
    st.integers(0, 2**63 - 1).map(lambda position: {"from": "Position", "position": position}),
    times.map(lambda time: {"from": "Time", "time": time}),
)
subscription_specs = st.fixed_dictionaries(
    {"relayRef": st.just({"name": "orders"}), "sink": sinks},
    optional={
        "state": st.sampled_from(["Running", "Paused"]),
        "filter": sometimes(
            eventTypes=patterns, aggregateTypes=patterns, tags=sometimes(allOf=st.lists(words), anyOf=st.lists(words))
        ),
        "partitions": st.integers(1, 256),
        "ordering": st.sampled_from(["Key", "None"]),
        "start": starts,
        "format": st.sampled_from(["CloudEvents", "CloudEventsJson", "Outbox", "Raw"]),
        "delivery": sometimes(
            batchSize=st.integers(1, 10_000),
            maxAttempts=st.integers(1, 1000),
            backoff=sometimes(max=spans, factor=st.floats(1, 100) | st.integers(1, 100), jitter=st.floats(0, 1)),
            timeout=spans,
            onExhausted=st.sampled_from(["DeadLetter", "Block"]),
        ),
    },
)


def manifest(kind: str, name: str, spec: Fields) -> Fields:
    return {"apiVersion": "mailboat.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def read(*bodies: Fields) -> Manifests:
    return read_documents((f"document {number}", body) for number, body in enumerate(bodies, start=1))


@given(relay_specs, subscription_specs)
def test_manifests_survive_writing_and_reading(relay: Fields, subscription: Fields) -> None:
    first = read(manifest("OutboxRelay", "orders", relay), manifest("EventSubscription", "out", subscription))
    written = [resource.manifest() for resource in (*first.relays, *first.subscriptions)]
    assert read(*(json.loads(json.dumps(body)) for body in written)) == first
    assert read(*yaml.safe_load_all(yaml.safe_dump_all(written))) == first


def test_a_status_survives_writing_and_reading() -> None:
    status = EventSubscriptionStatus(
        observed_generation=2,
        lag=7,
        oldest_age=Duration.parse("1m30s"),
        conditions=(
            Condition(
                type=ConditionType.READY, status=ConditionStatus.FALSE, reason=Reason.SINK_UNAVAILABLE, message="m"
            ),
        ),
    )
    assert EventSubscriptionStatus.model_validate(json.loads(json.dumps(status.manifest()))) == status
    assert status.manifest()["conditions"][0]["reason"] == "SinkUnavailable"


def test_python_code_writes_attributes_by_their_python_names() -> None:
    relay = OutboxRelay(
        metadata=Metadata(name="orders"), spec=OutboxRelaySpec(database=Database(url="postgresql://h/db"))
    )
    assert relay.manifest()["kind"] == "OutboxRelay"
    assert Delivery(batch_size=5, backoff=Backoff(initial=Duration.parse("5ms"))).manifest()["batchSize"] == 5
    assert Filter(event_types=(Pattern("a.*"),)).manifest()["eventTypes"] == ["a.*"]


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Delivery().batch_size = 5


def test_pydantic_does_not_repeat_values() -> None:
    with pytest.raises(ValidationError) as refused:
        Database(url="host=h password=hunter2")
    assert "hunter2" not in str(refused.value)
