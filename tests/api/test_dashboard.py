"""The dashboard with data of real relays, a real operator and a real Prometheus, including an outage of the broker.

If MAILBOAT_PICTURES is set, the test replaces the pictures in docs/images: the dashboard and a relay's page.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import mailboat
from mailboat_devservers.kafka import KafkaServer, start_kfake
from mailboat_devservers.kubernetes import ApiServer
from mailboat_devservers.ports import accepts_connections, free_port
from mailboat_devservers.postgres import Database
from mailboat_devservers.processes import Child
from support.browser import Browser
from support.dashboard_page import WIDTH, height, page
from support.helm_chart import CHART, ROOT
from support.manifests import LOG, Manifest, event_subscription, kafka_sink, outbox_relay_on
from support.operator_processes import RunningOperator, a_pod, a_relay, a_subscription, webhook_configuration
from support.prometheus_server import PrometheusServer, Series
from support.wait import wait_until

IMAGES = ROOT / "docs" / "images"
DASHBOARD: dict[str, Any] = json.loads((CHART / "files/dashboards/mailboat.json").read_text(encoding="utf-8"))
PATIENCE = 180.0
"""Seconds. Each wait takes a few on an idle machine."""


def filled_in(expression: str) -> str:
    """Replace Grafana's variables by values."""
    for variable, value in (("$__rate_interval", "10s"), ("$relay", ".*"), ("$subscription", ".*")):
        expression = expression.replace(variable, value)
    return expression


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_every_expression_of_the_dashboard_returns_data(
    api: ApiServer, namespace: str, outbox: Database, tmp_path: Path, or_skip: Callable[[Callable[[], Any]], Any]
) -> None:
    browser = or_skip(lambda: Browser.find(tmp_path / "profile"))
    with ExitStack() as stack:
        broker: KafkaServer = or_skip(lambda: start_kfake(tmp_path / "kfake"))
        stack.callback(broker.kill)
        for topic in ("orders", "orders.dead"):
            broker.create_topic(topic)
        operator = stack.enter_context(an_operator(api, namespace, tmp_path))
        relays = {f"orders-relay-{n}": free_port() for n in range(2)}
        targets = {f"127.0.0.1:{port}": {"pod": name} for name, port in relays.items()}
        targets[operator.address("health")] = {"pod": "mailboat-operator"}
        prometheus: PrometheusServer = or_skip(lambda: PrometheusServer(tmp_path / "prometheus", targets))
        prometheus.launch()
        stack.callback(prometheus.stop)
        manifests = tmp_path / "manifests.yaml"
        manifests.write_text("\n---\n".join(map(json.dumps, shop(outbox.url, broker.bootstrap))))
        for name, port in relays.items():
            stack.callback(a_running_relay(manifests, name, port).stop)
        begin = time.time()
        stack.enter_context(emitting(outbox.url))
        pages = [f"http://127.0.0.1:{port}/" for port in relays.values()]
        tell_the_story(prometheus, broker, outbox.url, lambda: look_at(browser, pages[0]))

        def answers(expression: str) -> list[Series]:
            return prometheus.series(filled_in(expression), begin, time.time())

        def has_data(expression: str) -> bool:  # a quantile has series without values until its counters rise
            return any(points for _, points in answers(expression))

        for panel in DASHBOARD["panels"]:
            for target in panel.get("targets", ()):
                wait_until(partial(has_data, target["expr"]), PATIENCE, f"data of {panel['title']!r}")
        drawn = tmp_path / "dashboard.html"
        drawn.write_text(page(DASHBOARD, answers), encoding="utf-8")
    document = browser.document(drawn.as_uri())
    assert all(f"<h2>{panel['title']}</h2>" in document for panel in DASHBOARD["panels"])
    keep("dashboard.png", browser.picture(drawn.as_uri(), WIDTH, height(DASHBOARD)))


def look_at(browser: Browser, page_of_relay: str) -> None:
    assert "shop/orders-to-kafka" in browser.document(page_of_relay)
    keep("relay-page.png", browser.picture(page_of_relay, 1180, 620))


def keep(name: str, picture: bytes) -> None:
    if os.environ.get("MAILBOAT_PICTURES"):
        (IMAGES / name).write_bytes(picture)
    assert (IMAGES / name).exists()


def tell_the_story(
    prometheus: PrometheusServer, broker: KafkaServer, url: str, in_the_outage: Callable[[], None]
) -> None:
    """Run the scenario: delivery, an outage of the broker, recovery, and an event that the broker refuses."""

    def until(expression: str, met: Callable[[float], bool]) -> None:
        def reached() -> bool:
            value = prometheus.value(expression)
            return value is not None and met(value)

        wait_until(reached, PATIENCE, expression)

    until("sum(mailboat_published_total)", lambda published: published > 300)
    broker.kill()
    until("min(mailboat_sink_up)", lambda up: up == 0)
    until("sum(mailboat_lag)", lambda lag: lag > 100)
    in_the_outage()
    broker.launch()
    until("min(mailboat_sink_up)", lambda up: up == 1)
    until("sum(mailboat_lag)", lambda lag: lag < 50)
    with psycopg.connect(url) as connection:
        mailboat.emit(connection, "order.placed", {"text": "x" * 1_500_000}, key="too-large")
    until("max(mailboat_dead_letters)", lambda dead: dead == 1)
    until("max(mailboat_unmatched_events)", lambda unmatched: unmatched > 0)


@contextmanager
def an_operator(api: ApiServer, namespace: str, folder: Path) -> Iterator[RunningOperator]:
    """Run an operator with a relay, a subscription, and a pod for which its webhook was called."""
    operator = RunningOperator(folder, "one", api.kubeconfig, namespace)
    try:
        for document in (
            webhook_configuration(namespace, operator.address("webhook")),
            a_relay(),
            a_subscription(),
        ):
            api.kubectl("apply", "--namespace", namespace, "--filename", "-", input=json.dumps(document))
        pod = json.dumps(a_pod("shop"))
        create = ("create", "--namespace", namespace, "--dry-run=server", "--filename", "-")
        wait_until(
            lambda: (
                api.try_kubectl(*create, input=pod).status == 0
                and "mailboat_operator_injections_total{" in operator.get("/metrics")[1]
            ),
            PATIENCE,
            "the webhook to be called",
        )
        api.kubectl("create", "--namespace", namespace, "--filename", "-", input=pod)
        yield operator
    finally:
        operator.end()
        api.kubectl("delete", "mutatingwebhookconfiguration", namespace)


def shop(url: str, bootstrap: str) -> list[Manifest]:
    orders = {"eventTypes": ["order.*"]}
    delivery = {"timeout": "5s", "deadLetter": {"topic": "orders.dead"}}
    return [
        outbox_relay_on(url),
        event_subscription("orders-to-kafka", kafka_sink(bootstrap), filter=orders, delivery=delivery, partitions=4),
        event_subscription("orders-to-log", LOG, filter=orders, partitions=4),
    ]


def a_running_relay(manifests: Path, name: str, port: int) -> Child:
    command = [str(Path(sys.executable).with_name("mailboat")), "run", "-f", str(manifests), "--relay-id", name]
    relay = Child(
        name,
        [*command, "--listen", f"127.0.0.1:{port}"],
        log=manifests.with_name(f"{name}.log"),
        ready=lambda: accepts_connections(port),
        start_timeout=PATIENCE,
    )
    relay.launch()
    return relay


@contextmanager
def emitting(url: str) -> Iterator[None]:
    """Emit about 50 matching events per second, and 10 per second that no subscription matches.

    Relays count unmatched events once a minute, among the newest 1000 events. A single one would be older than those.
    """
    stop = threading.Event()

    def emit() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not stop.wait(0.1):
                with connection.transaction():
                    mailboat.emit(connection, "invoice.sent", {}, key="i-1")
                    for number in range(5):
                        mailboat.emit(connection, "order.placed", {"order": number}, key=f"o-{number}")

    thread = threading.Thread(target=emit, name="producer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
