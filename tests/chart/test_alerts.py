"""Alerts and dashboard query metrics that exist, with labels that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest

from support.helm_chart import CHART, ROOT, one, rendered

DASHBOARD: dict[str, Any] = json.loads((CHART / "files/dashboards/mailboat.json").read_text(encoding="utf-8"))


def exposed_metrics() -> set[str]:
    """Names of all metrics of relay and operator, with the suffixes of counters, histograms and infos."""
    found: set[str] = set()
    for file in (ROOT / "relay/mailboat/http/metrics.py", *(ROOT / "operator/mailboat_operator").rglob("*.py")):
        found |= set(re.findall(r'"(mailboat_[a-z_]+)"', file.read_text(encoding="utf-8")))
    return found | {name + ending for name in found for ending in ("_total", "_info", "_bucket", "_sum", "_count")}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(mailboat_[a-z_]+)", expression))


def dashboard_expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return panels + [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]


def as_grafana_sends_it(expression: str) -> str:
    """Replace variables, and strip ``label_values``, which Grafana evaluates itself."""
    labels = re.fullmatch(r"label_values\((.+), *\w+\)", expression)
    return (labels[1] if labels else expression).replace("$__rate_interval", "1m")


def test_the_dashboard_queries_metrics_that_exist() -> None:
    queried = {name for expression in dashboard_expressions() for name in metrics_in(expression)}
    assert queried
    assert not queried - exposed_metrics()


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert (x, y) not in taken, f"{panel['title']} overlaps {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    groups = one(rendered("everything"), "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.api
def test_the_dashboard_reaches_the_cluster_unchanged() -> None:
    assert json.loads(one(rendered("everything"), "ConfigMap")["data"]["mailboat.json"]) == DASHBOARD


@pytest.mark.api
def test_alerts_query_metrics_that_exist(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert metrics_in(rule["expr"])
        assert not metrics_in(rule["expr"]) - exposed_metrics(), rule["alert"]


@pytest.mark.api
def test_the_expressions_of_alerts_and_dashboard_are_valid_promql(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        promql_parser.parse(rule["expr"])
        for length in (rule.get("for"), rule.get("keep_firing_for")):
            assert length is None or promql_parser.parse_duration(length)
    for expression in dashboard_expressions():
        promql_parser.parse(as_grafana_sends_it(expression))


@pytest.mark.api
def test_alerts_have_a_severity_a_summary_a_description_and_a_runbook(rules: list[dict[str, Any]]) -> None:
    names = [rule["alert"] for rule in rules]
    assert len(names) == len(set(names))
    for rule in rules:
        assert rule["labels"] == {"severity": rule["labels"]["severity"], "team": "platform"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert len(rule["annotations"]["summary"]) > 20
        assert len(rule["annotations"]["description"]) > 60
        assert rule["annotations"]["runbook_url"] == "https://example.com/mailboat#alerts"
        # The expression keeps every label that the annotations print.
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", rule["expr"]), rule["alert"]


@pytest.mark.api
def test_the_chart_has_these_alerts(rules: list[dict[str, Any]]) -> None:
    assert {rule["alert"].removeprefix("Mailboat") for rule in rules} >= {
        "LagGrowing",
        "SubscriptionBehind",
        "CertificateEnds",
        "DeadLetters",
        "SinkUnreachable",
        "PartitionsRunOut",
        "RetentionBlocked",
        "OperatorWithoutLeader",
        "RelayDown",
    }


@pytest.mark.api
def test_an_old_event_fires_an_alert_without_a_growing_lag(rules: list[dict[str, Any]]) -> None:
    """As values.yaml documents it: the lag behind a blocked key may not grow."""
    (behind,) = (rule for rule in rules if rule["alert"] == "MailboatSubscriptionBehind")
    assert metrics_in(behind["expr"]) == {"mailboat_oldest_age_seconds", "mailboat_paused"}
    assert "> 300" in behind["expr"]


@pytest.mark.api
def test_alerts_about_operators_select_the_namespace_of_the_release(rules: list[dict[str, Any]]) -> None:
    selectors = [
        name for rule in rules for name in re.findall(r"mailboat_operator_(?:leader|certificate_\w+)\S*", rule["expr"])
    ]
    assert len(selectors) == 2
    assert all('{namespace="mailboat-system"}' in each for each in selectors)
