"""Alerts and dashboard ask for metrics that exist, by labels that they have."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest

from support.helm_chart import CHART, ROOT, one, rendered

DASHBOARD: dict[str, Any] = json.loads((CHART / "files/dashboards/mailboat.json").read_text(encoding="utf-8"))


def metrics_of_this_house() -> set[str]:
    """As they are exposed: counters end in _total, histograms have three forms, an info ends in _info."""
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
    """Variables filled in, and the one function that Grafana answers itself taken off."""
    labels = re.fullmatch(r"label_values\((.+), *\w+\)", expression)
    return (labels[1] if labels else expression).replace("$__rate_interval", "1m")


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    asked = {name for expression in dashboard_expressions() for name in metrics_in(expression)}
    assert asked
    assert not asked - metrics_of_this_house()


def test_the_dashboards_panels_do_not_lie_upon_one_another() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert (x, y) not in taken, f"{panel['title']} lies upon {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    groups = one(rendered("everything"), "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.api
def test_the_dashboard_reaches_the_cluster_unchanged() -> None:
    assert json.loads(one(rendered("everything"), "ConfigMap")["data"]["mailboat.json"]) == DASHBOARD


@pytest.mark.api
def test_alerts_ask_for_metrics_that_exist(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert metrics_in(rule["expr"])
        assert not metrics_in(rule["expr"]) - metrics_of_this_house(), rule["alert"]


@pytest.mark.api
def test_prometheus_understands_what_alerts_and_dashboard_ask(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        promql_parser.parse(rule["expr"])
        for length in (rule.get("for"), rule.get("keep_firing_for")):
            assert length is None or promql_parser.parse_duration(length)
    for expression in dashboard_expressions():
        promql_parser.parse(as_grafana_sends_it(expression))
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum by (namespace (mailboat_lag)")


@pytest.mark.api
def test_alerts_say_what_happened_and_what_to_do(rules: list[dict[str, Any]]) -> None:
    names = [rule["alert"] for rule in rules]
    assert len(names) == len(set(names))
    for rule in rules:
        assert rule["labels"] == {"severity": rule["labels"]["severity"], "team": "platform"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert len(rule["annotations"]["summary"]) > 20
        assert len(rule["annotations"]["description"]) > 60
        assert rule["annotations"]["runbook_url"] == "https://example.com/mailboat#alerts"
        # A label that an alert prints is one that its expression keeps.
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", rule["expr"]), rule["alert"]


@pytest.mark.api
def test_what_a_person_must_hear_of_has_an_alert(rules: list[dict[str, Any]]) -> None:
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
def test_an_old_event_is_reason_enough_whether_or_not_more_follow_it(rules: list[dict[str, Any]]) -> None:
    """As values.yaml promises: a blocked key makes no lag that grows."""
    (behind,) = (rule for rule in rules if rule["alert"] == "MailboatSubscriptionBehind")
    assert metrics_in(behind["expr"]) == {"mailboat_oldest_age_seconds", "mailboat_paused"}
    assert "> 300" in behind["expr"]


@pytest.mark.api
def test_what_is_said_about_operators_is_about_those_of_the_release(rules: list[dict[str, Any]]) -> None:
    asked = [
        name for rule in rules for name in re.findall(r"mailboat_operator_(?:leader|certificate_\w+)\S*", rule["expr"])
    ]
    assert len(asked) == 2
    assert all('{namespace="mailboat-system"}' in each for each in asked)
