"""The manifest of the documentation is valid without changes, and the values that it shows are the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mailboat_spec import (
    Duration,
    EventSubscription,
    Manifests,
    OutboxRelay,
    Pattern,
    Pooler,
    full_name,
    names,
    read_documents,
)
from support.manifests import event_subscription, kafka_sink, outbox_relay

MINIMAL_RELAY = outbox_relay()
MINIMAL_SUBSCRIPTION = event_subscription("orders-to-kafka", kafka_sink())


@pytest.fixture(scope="module")
def documented() -> Manifests:
    text = (Path(__file__).parent / "design.yaml").read_text()
    return read_documents((f"document {n}", body) for n, body in enumerate(yaml.safe_load_all(text), start=1))


@pytest.fixture(scope="module")
def minimal() -> Manifests:
    return read_documents([("relay", MINIMAL_RELAY), ("subscription", MINIMAL_SUBSCRIPTION)])


def test_the_documented_manifest_is_read(documented: Manifests) -> None:
    (relay,), (subscription, billing) = documented.relays, documented.subscriptions
    assert full_name(relay) == "shop/orders"
    assert full_name(subscription) == "shop/orders-to-kafka"
    assert (subscription.spec.source_name, billing.spec.source_name) == ("outbox/orders", "kafka/orders")
    assert subscription.spec.filter.event_types == (Pattern("order.*"),)
    assert subscription.spec.sink.kind == "kafka"
    assert subscription.spec.sink.kafka is not None
    assert subscription.spec.sink.chosen is subscription.spec.sink.kafka
    assert subscription.spec.sink.kafka.bootstrap_servers == ("kafka:9092",)
    assert subscription.spec.sink.kafka.config_secret_ref is None
    assert subscription.spec.delivery.dead_letter is not None
    assert subscription.spec.delivery.dead_letter.topic == "orders.dead"
    assert billing.spec.idempotency is not None
    assert billing.spec.idempotency.ttl == Duration.parse("720h")


def test_the_documented_consumer_fields_are_the_defaults(documented: Manifests) -> None:
    written = documented.subscriptions[1]
    assert written.spec.source is not None
    assert written.spec.source.kafka is not None
    kafka = {"bootstrapServers": ["kafka:9092"], "topic": "orders"}
    store = {"redis": {"urlSecretRef": {"name": "redis", "key": "url"}}}
    body = {"source": {"kafka": kafka}, "sink": {"pull": {}}, "idempotency": store}
    plain = EventSubscription.model_validate({"metadata": {"name": "billing", "namespace": "shop"}, "spec": body})
    assert plain.spec.idempotency == written.spec.idempotency
    for each in (plain, written):
        assert (each.group, each.dead_letter_topic) == ("shop.billing", "orders.billing.dead")
        assert (each.spec.handlers, each.spec.max_attempts) == (32, 4)


def test_the_documented_relay_fields_are_the_defaults(documented: Manifests, minimal: Manifests) -> None:
    assert documented.relays == minimal.relays


def test_the_documented_subscription_fields_are_the_defaults(documented: Manifests, minimal: Manifests) -> None:
    written, plain = (manifests.subscriptions[0].manifest()["spec"] for manifests in (documented, minimal))
    written["filter"].pop("eventTypes"), plain["filter"].pop("eventTypes")
    written["delivery"].pop("deadLetter")
    assert (written["delivery"].pop("batchSize"), written["delivery"].pop("maxAttempts")) == (500, 25)
    assert written == plain


def test_defaults_that_it_does_not_show(minimal: Manifests) -> None:
    assert minimal.relays[0].spec.database.pooler is Pooler.AUTO
    assert (minimal.subscriptions[0].spec.batch_size, minimal.subscriptions[0].spec.max_attempts) == (500, 25)


def test_handlers_get_fewer_attempts_and_smaller_batches_than_brokers() -> None:
    pulled = event_subscription("orders-view", {"pull": {}})
    spec = read_documents([("relay", MINIMAL_RELAY), ("subscription", pulled)]).subscriptions[0].spec
    assert (spec.batch_size, spec.max_attempts) == (100, 4)


def test_a_sidecar_has_no_replicas() -> None:
    assert read_documents([("relay", outbox_relay(runtime="Sidecar"))]).relays[0].spec.replicas is None


def test_a_field_left_empty_counts_as_not_given(minimal: Manifests) -> None:
    body = outbox_relay(outbox=None, replicas=None, wake={"notify": None})
    assert read_documents([("relay", body)]).relays == minimal.relays


def test_the_kinds_have_the_names_of_the_module() -> None:
    assert OutboxRelay.model_fields["kind"].default == names.RELAY_KIND
    assert EventSubscription.model_fields["kind"].default == names.SUBSCRIPTION_KIND
    assert OutboxRelay.model_fields["api_version"].default == names.API_VERSION
