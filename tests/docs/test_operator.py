"""docs/operator.md lists the operator's settings, exit codes and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from mailboat_operator import __main__ as command
from mailboat_operator.metrics import Metrics
from mailboat_operator.settings import options
from support.markdown import rows

PAGE = (Path(__file__).parents[2] / "docs" / "operator.md").read_text(encoding="utf-8")


def test_the_documented_settings_are_those_of_the_operator() -> None:
    expected = []
    for option in options():
        text, _, variables = (option.help or "").removesuffix("]").partition(" [$")
        expected.append([f"`{option.opts[0]}`", ", ".join(f"`{name}`" for name in variables.split(", $")), text])
    assert rows(PAGE, "\n## Settings") == expected


def test_the_documented_exit_codes_are_those_of_the_command() -> None:
    listed = re.findall(r"(\d) ", (command.__doc__ or "").partition("Exit codes:")[2])
    assert [row[0] for row in rows(PAGE, "\n## Exit codes")] == listed
    assert {str(command.WRONG_SETTINGS), str(command.NO_CLUSTER)} <= set(listed)


def test_the_metrics_are_those_that_it_exposes_with_their_labels() -> None:
    exposed = {
        metric._name + ("_total" if metric._type == "counter" else ""): set(metric._labelnames)
        for metric in vars(Metrics(CollectorRegistry())).values()
    }
    listed = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows(PAGE, "\n## Metrics")}
    assert listed == exposed
