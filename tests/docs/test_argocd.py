"""The health script for Argo CD, run as Argo CD runs it: Lua 5.1, the object in ``obj``, returns status and message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import lua51  # type: ignore[import-untyped]

from mailboat_spec import ConditionStatus, ConditionType, Reason
from mailboat_spec.names import GROUP, RELAY_KIND, SUBSCRIPTION_KIND
from mailboat_spec.resources.status import Condition, ResourceStatus

FILE = Path(__file__).parents[2] / "examples" / "argocd" / "argocd-cm.yaml"
SCRIPTS: dict[str, str] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["data"]


def health(status: dict[str, Any] | None, generation: int = 1) -> tuple[str, str]:
    lua = lua51.LuaRuntime()
    body: dict[str, Any] = {"metadata": {"generation": generation}}
    if status is not None:
        body["status"] = status
    run = lua.execute(f"return function(obj)\n{SCRIPTS[script_of(SUBSCRIPTION_KIND)]}\nend")
    answer = run(lua.table_from(body, recursive=True))
    return answer["status"], answer["message"]


def script_of(kind: str) -> str:
    return f"resource.customizations.health.{GROUP}_{kind}"


def reported(*conditions: Condition, generation: int = 1) -> dict[str, Any]:
    return ResourceStatus(observed_generation=generation, conditions=conditions).manifest()


def said(type_: ConditionType, status: ConditionStatus, reason: Reason, message: str = "") -> Condition:
    return Condition(type=type_, status=status, reason=reason, message=message)


READY, YES, NO = ConditionType.READY, ConditionStatus.TRUE, ConditionStatus.FALSE


def test_both_kinds_have_the_same_script() -> None:
    assert set(SCRIPTS) == {script_of(RELAY_KIND), script_of(SUBSCRIPTION_KIND)}
    assert len(set(SCRIPTS.values())) == 1


@pytest.mark.parametrize("status", [None, {}, {"conditions": []}], ids=["none", "empty", "without conditions"])
def test_a_resource_that_the_operator_has_not_seen_is_progressing(status: dict[str, Any] | None) -> None:
    assert health(status)[0] == "Progressing"


def test_a_status_of_an_older_version_is_ignored() -> None:
    assert health(reported(said(READY, YES, Reason.DELIVERING)), generation=2)[0] == "Progressing"


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([said(READY, YES, Reason.DELIVERING, "All is well.")], ("Healthy", "All is well.")),
        ([said(READY, YES, Reason.AVAILABLE)], ("Healthy", "Available")),
        ([said(READY, NO, Reason.STARTING, "No relay yet.")], ("Progressing", "No relay yet.")),
        ([said(READY, ConditionStatus.UNKNOWN, Reason.STARTING, "Wait.")], ("Progressing", "Wait.")),
        ([said(READY, NO, Reason.SINK_UNAVAILABLE, "Correct it.")], ("Degraded", "Correct it.")),
        (
            [
                said(READY, NO, Reason.PROGRESSING, "Change it."),
                said(ConditionType.STALLED, YES, Reason.INVALID_SPEC, "Never."),
            ],
            ("Degraded", "Change it."),
        ),
        (
            [
                said(READY, NO, Reason.PAUSED_BY_SPEC, "Paused."),
                said(ConditionType.PAUSED, YES, Reason.PAUSED_BY_SPEC, "By spec."),
            ],
            ("Suspended", "By spec."),
        ),
    ],
)
def test_health_follows_the_conditions(conditions: list[Condition], expected: tuple[str, str]) -> None:
    assert health(reported(*conditions)) == expected


def test_the_reasons_that_pass_are_ours() -> None:
    script = SCRIPTS[script_of(RELAY_KIND)]
    passing = script.partition("{")[2].partition("}")[0]
    assert {word.partition(" =")[0].strip() for word in passing.split(",")} <= set(Reason)
