"""The schema of the values is complete, and Helm refuses unknown and invalid values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from support.helm_chart import CHART, COMMON, RELEASE, helm, variants

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

OF_KUBERNETES = {"podSecurityContext", "securityContext", "affinity", "resources.requests", "resources.limits"}
"""Passed through as they are: the API server validates their fields."""


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rsplit("/", 1)[1]] if reference else schema


def objects(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object of the schema with its path."""
    schema = resolved(schema)
    if schema.get("type") == "object":
        yield path, schema
        for name, each in schema.get("properties", {}).items():
            yield from objects(each, f"{path}.{name}".lstrip("."))


def test_every_object_refuses_unknown_fields() -> None:
    open_objects = {path for path, schema in objects(SCHEMA) if "additionalProperties" not in schema}
    assert open_objects == OF_KUBERNETES | {"global"}


def test_schema_and_defaults_have_the_same_fields() -> None:
    def compare(schema: Mapping[str, Any], values: Any, path: str) -> None:
        known = resolved(schema).get("properties")
        if known is None or path == "webhook.certManager.issuerRef":  # a complete reference or none
            return
        assert set(values) == set(known) - ({"global"} if not path else {"claims"}), path or "the top"
        for name, each in values.items():
            compare(known[name], each, f"{path}.{name}".lstrip("."))

    compare(SCHEMA, VALUES, "")


@pytest.mark.api
@pytest.mark.parametrize("variant", variants())
def test_helm_lint_passes(variant: str) -> None:
    done = helm("lint", "--strict", *COMMON, "--values", str(CHART / "ci" / f"{variant}-values.yaml"), str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert findings == ["[INFO] Chart.yaml: icon is recommended"]


@pytest.mark.api
@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("replica=2", "replica"),
        ("webhook.failurePolcy=Fail", "failurePolcy"),
        ("webhook.failurePolicy=Maybe", "failurePolicy"),
        ("watch.namespaces[0]=Not_A_Name", "namespaces"),
        ("operator.statusInterval=five", "statusInterval"),
        ("operator.logLevel=loud", "logLevel"),
        ("image.digest=latest", "digest"),
        ("metrics.prometheusRule.enabled=yes", "enabled"),
        ("replicas=-1", "replicas"),
        ("operator.extraArgs[0]=run", "extraArgs"),
        ("operator.statusInterval=0s", "statusInterval"),
        ("operator.statusInterval=500ms", "statusInterval"),
        ("operator.statusInterval=2h", "statusInterval"),
        ("operator.shutdownDelay=60s", "shutdownDelay"),
        ("operator.shutdownDelay=1m", "shutdownDelay"),
        ("webhook.timeoutSeconds=3", "timeoutSeconds"),
        ("webhook.certManager.issuerRef.kind=ClusterIssuer", "issuerRef"),
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
        ("podDisruptionBudget.maxUnavailable=0%", "maxUnavailable"),
        ("networkPolicy.apiServerPorts={}", "apiServerPorts"),
    ],
)
def test_an_invalid_value_is_refused_by_name(setting: str, complaint: str) -> None:
    done = helm("template", RELEASE, str(CHART), *COMMON, "--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.api
def test_without_an_account_of_the_chart_a_name_is_required() -> None:
    done = helm("template", RELEASE, str(CHART), *COMMON, "--set", "serviceAccount.create=false")
    assert done.returncode != 0
    assert "serviceAccount.name is required" in done.stderr
