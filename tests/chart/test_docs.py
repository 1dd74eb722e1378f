"""docs/kubernetes.md names the values and alerts of the chart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from support.helm_chart import CHART, ROOT, one, rendered
from support.markdown import rows

TEXT = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def test_documented_values_exist_with_the_documented_defaults() -> None:
    for names, default, _ in rows(TEXT, "what kind of installation"):
        for name in re.findall(r"`([^`]+)`", names):
            value: Any = VALUES
            for part in name.split("."):
                value = value[part]
            assert yaml.safe_load(default.strip("`")) == value, name


def test_values_in_documented_commands_exist() -> None:
    named = re.findall(r"--set ([\w.]+)=", TEXT)
    assert named
    for name in named:
        value: Any = VALUES
        for part in name.split("."):
            assert part in value, name
            value = value[part]


@pytest.mark.api
def test_documented_alerts_are_those_of_the_chart() -> None:
    groups = one(rendered("everything"), "PrometheusRule")["spec"]["groups"]
    listed = rows(TEXT, "### Alerts")
    assert [name for name, *_ in listed] == [rule["alert"] for group in groups for rule in group["rules"]]
    assert all(len(do) > 20 for *_, do in listed), "an alert without a remedy"
