"""The examples are valid, for the models here and for an API server in ``tests/api/test_examples.py``."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from mailboat.http.assignment import parse
from mailboat.runtime.config import load
from mailboat_harbor.postgres import PostgresServer
from mailboat_spec import Manifests
from mailboat_spec.names import API_VERSION, RELAY_LABEL
from support.cli import RunningRelay
from support.databases import migrated_database
from support.wait import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))
MANIFESTS = [file for file in FILES if API_VERSION in file.read_text(encoding="utf-8")]


def name(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def ours(file: Path) -> Manifests:
    """As the command line reads the file: what else stands in it is passed over."""
    return load([file], needs_relay=False)


def test_there_are_examples() -> None:
    assert {"orders-to-kafka.yaml", "orders-to-pubsub.yaml", "sidecar-job.yaml"} <= {file.name for file in MANIFESTS}
    assert {name(file) for file in FILES} - {name(file) for file in MANIFESTS} == {
        "argocd/argocd-cm.yaml",
        "billing/deployment.yaml",
        "compose/compose.yaml",
    }


@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_an_example_is_whole_and_valid(file: Path) -> None:
    manifests = ours(file)
    assert manifests.subscriptions
    assert len(manifests.relays) == (0 if manifests.subscriptions[0].spec.source is not None else 1)


@pytest.mark.parametrize("file", MANIFESTS, ids=name)
def test_an_example_begins_by_saying_what_it_is_for(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") or file.parent.name == "laptop"  # that one is shown in the README as it is


@pytest.mark.parametrize("file", [file for file in MANIFESTS if "sidecar" in file.name], ids=name)
def test_the_pods_of_a_sidecar_example_ask_for_its_relay(file: Path) -> None:
    (relay,) = ours(file).relays
    (workload,) = (body for body in documents(file) if body["apiVersion"] != API_VERSION)
    assert workload["spec"]["template"]["metadata"]["labels"][RELAY_LABEL] == relay.metadata.name


def test_the_commands_of_the_assignment_share_the_partitions_as_it_says(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EXAMPLES / "assignment"
    lines = re.findall(r"^# +mailboat run (.*)$", (folder / "orders.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    with contextmanager(migrated_database)(postgres) as outbox, ExitStack() as stack:
        monkeypatch.setenv("MAILBOAT_SECRET_ORDERS_DB_URL", outbox.url)
        for number, line in enumerate(lines):
            assert "--listen 127.0.0.1:0" in line, "a second relay can't listen where the first one does"
            there = [str(folder / word) if (folder / word).exists() else word for word in line.split()]
            relay = RunningRelay(there, tmp_path / f"relay-{number}.log")
            stack.callback(relay.stop)
        wait_until(
            lambda: outbox.execute("select owner from mailboat.cursors order by partition"),
            timeout=180,
            what="each relay to have its own",
            met=lambda owners: owners == [("relay-a",), ("relay-a",), ("relay-b",), ("relay-b",)],
        )


def test_the_example_of_an_assignment_fits_its_subscription() -> None:
    file = EXAMPLES / "assignment" / "assignment.json"
    (subscription,) = ours(file.with_name("orders.yaml")).subscriptions
    ((of, owners),) = parse(file.read_bytes(), file.name).subscriptions.items()
    assert of == f"{subscription.metadata.namespace}/{subscription.metadata.name}"
    assert sorted(owners) == list(range(subscription.spec.partitions))
