"""Metrics have the values of the status, and labels of bounded cardinality."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from mailboat.delivery.counters import DeliveryHistograms
from mailboat.runtime.relay_status import RelayState
from mailboat.store.examination import Coverage
from mailboat_spec.relay_status import as_json
from support.relay_statuses import relay, subscription

OURS = {"relay": "shop/orders", "subscription": "shop/orders-to-kafka"}


async def scrape(client, accept=""):
    async with client.get("/metrics", headers={"Accept": accept}) as response:
        assert response.status == 200
        return await response.text(), response.headers["Content-Type"]


async def samples(client):
    text, _ = await scrape(client)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("mailboat_")
    }


def of(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


async def test_metrics_of_a_subscription(client, relays):
    relays.statuses = [relay()]
    found = await samples(client)
    assert of(found, "mailboat_lag", **OURS) == 4
    assert of(found, "mailboat_lag_bounded", **OURS) == 0
    assert of(found, "mailboat_oldest_age_seconds", **OURS) == 1.5
    assert of(found, "mailboat_published_total", **OURS) == 20
    assert of(found, "mailboat_refused_total", **OURS) == 3
    assert of(found, "mailboat_parked", **OURS) == 2
    assert of(found, "mailboat_dead_letters", **OURS) == 1
    assert of(found, "mailboat_sink_up", **OURS) == 1
    assert of(found, "mailboat_owned_partitions", **OURS) == 2
    assert of(found, "mailboat_partitions", **OURS) == 4
    assert of(found, "mailboat_paused", **OURS) == 0
    assert of(found, "mailboat_failed", **OURS) == 0


async def test_unmatched_events_are_a_metric_of_the_relay(client, relays):
    relays.statuses = [relay(coverage=Coverage({"orders.placed": 2, "invoice.sent": 1}, ("shop/rare",)))]
    assert of(await samples(client), "mailboat_unmatched_events", relay="shop/orders") == 3
    assert as_json(relays.statuses[0])["coverage"] == {
        "unmatched": {"orders.placed": 2, "invoice.sent": 1},
        "idle": ["shop/rare"],
    }


async def test_histograms_of_delivery(client, relays):
    meters = DeliveryHistograms()
    meters.batch.observe(3)
    meters.delivered((datetime.now(UTC) - timedelta(seconds=2)).isoformat(), attempts=1, events=3)
    meters.delivered("infinity", attempts=4, events=1)
    relays.statuses = [relay(subscriptions=(subscription(meters=meters),))]
    found = await samples(client)
    assert of(found, "mailboat_batch_size_bucket", **OURS, le="2.0") == 0
    assert of(found, "mailboat_batch_size_bucket", **OURS, le="5.0") == 1
    assert of(found, "mailboat_delivery_attempts_bucket", **OURS, le="1.0") == 3
    assert of(found, "mailboat_delivery_attempts_count", **OURS) == 4
    assert of(found, "mailboat_delivery_attempts_sum", **OURS) == 7
    assert of(found, "mailboat_delivery_latency_seconds_bucket", **OURS, le="1.0") == 0
    assert of(found, "mailboat_delivery_latency_seconds_bucket", **OURS, le="+Inf") == 1
    assert "meters" not in as_json(relays.statuses)[0]["subscriptions"][0]


async def test_metrics_of_a_relay(client, relays):
    relays.statuses = [relay(retention_blocked="p: shop/x has not delivered it yet", oldest_snapshot_age=7.5)]
    found = await samples(client)
    assert of(found, "mailboat_relay_running", relay="shop/orders") == 1
    assert of(found, "mailboat_database_up", relay="shop/orders") == 1
    assert of(found, "mailboat_time_partitions_ahead_days", relay="shop/orders") == 29.5
    assert of(found, "mailboat_retention_blocked", relay="shop/orders") == 1
    assert of(found, "mailboat_oldest_snapshot_age_seconds", relay="shop/orders") == 7.5
    (info,) = [dict(labels) for name, labels in found if name == "mailboat_relay_info"]
    assert info["id"] == "a"
    assert info["outbox"] == "mailboat.outbox"


async def test_metrics_of_an_outage_and_a_pause(client, relays):
    unavailable = subscription(sink_reachable=False, oldest_age=None, state="Paused", lag=100_000, lag_bounded=True)
    relays.statuses = [
        relay(
            state=RelayState.CONNECTING,
            database_reachable=False,
            partitions_ahead_days=None,
            subscriptions=(unavailable,),
        )
    ]
    found = await samples(client)
    assert of(found, "mailboat_sink_up", **OURS) == 0
    assert of(found, "mailboat_database_up", relay="shop/orders") == 0
    assert of(found, "mailboat_relay_running", relay="shop/orders") == 0
    assert of(found, "mailboat_paused", **OURS) == 1
    assert of(found, "mailboat_lag_bounded", **OURS) == 1
    assert of(found, "mailboat_oldest_age_seconds", **OURS) == 0
    assert not [name for name, _ in found if name == "mailboat_time_partitions_ahead_days"]


async def test_a_failed_subscription_has_a_metric(client, relays):
    relays.statuses = [relay(subscriptions=(subscription(state="Failed", owned=(), sink_reachable=False),))]
    assert of(await samples(client), "mailboat_failed", **OURS) == 1


async def test_labels_are_names_of_resources_only(client, relays):
    failing = subscription(last_error="event 4711 of key customer-12 was refused")
    relays.statuses = [relay(subscriptions=(failing,), message="something happened")]
    found = await samples(client)
    names = {label for name, labels in found if name != "mailboat_relay_info" for label, _ in labels}
    assert names == {"relay", "subscription"}
    assert "customer-12" not in str(found)


async def test_openmetrics_is_served_on_request(client, relays):
    relays.statuses = [relay()]
    text, content_type = await scrape(client, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert "mailboat_lag" in {family.name for family in parse_openmetrics(text)}
