"""Story 1: what the README says about Kubernetes: install, apply, and watch events flow.

Its commands are taken from the README and run as they are, but for the namespace, the images and the address of the
database; the first of them, ``helm install``, has installed the Mailboat of all stories (``installed.py``).
"""

from __future__ import annotations

import json

import pytest

from helm_release import Installed
from kubectl_table import Row, tables
from namespace import DATABASE, Stage, wrong_in
from readme import ROOT, answer, commands, question
from support.locks import locked
from support.wait import wait_until

EVENTS = 10_000
INSTALLED = """
import importlib.metadata, json, re
found = importlib.metadata.distributions()
print(json.dumps({re.sub("[-_.]+", "-", each.name).lower(): each.version for each in found}))
"""
KAFKA, PUBSUB = "orders-to-kafka", "orders-to-pubsub"


def test_what_was_installed_passes_the_test_of_its_own_chart(mailboat: Installed) -> None:
    [phase] = [line.split()[1] for line in mailboat.test().splitlines() if line.startswith("Phase:")]
    assert phase == "Succeeded"


def test_what_the_readme_says_leads_to_what_the_readme_shows(stage: Stage) -> None:
    _, namespace, *rest = commands()
    assert namespace == ["kubectl", "create", "namespace", "shop"]  # the stage has made its own
    for command in rest:
        typed(stage, command)
    stage.until_ready("orders", kind="outboxrelay")
    stage.until_ready(KAFKA)
    with stage.trading():
        wait_until(
            lambda: tables(typed(stage, question())),
            180,
            "kubectl to print what the README shows",
            met=lambda printed: without_figures(printed) == without_figures(tables(answer())),
        )


@pytest.mark.parametrize("image", ["operator", "relay"])
def test_an_image_holds_what_its_lock_says_and_nothing_else(image: str, stage: Stage, mailboat: Installed) -> None:
    pods = mailboat.operators() if image == "operator" else stage.all("pods", "mailboat.dev/relay=orders")
    metadata = pods[0]["metadata"]
    where = ("--namespace", metadata["namespace"], metadata["name"])
    installed = json.loads(stage.cluster.kubectl("exec", *where, "--", "python", "-c", INSTALLED))
    own = {name for name in installed if name.startswith("mailboat")}
    assert own == {"mailboat-spec", "mailboat-operator" if image == "operator" else "mailboat"}
    assert {name: version for name, version in installed.items() if name not in own}.items() <= locked(image).items()


def test_ten_thousand_events_arrive_at_both_destinations_in_order(stage: Stage) -> None:
    stage.apply("pubsub")
    stage.kubectl("rollout", "status", "deployment/pubsub", "--timeout=180s")
    stage.prepare("--pubsub-topic", "shop/orders")
    stage.apply("to-pubsub")
    stage.until_ready(PUBSUB)
    stage.trade(EVENTS)
    for topic in ("orders", "shop/orders"):
        proof = stage.audit(topic)
        assert wrong_in(proof) == {}, topic
        assert proof["received"] == proof["written"] >= EVENTS
        assert proof["numbers_left_out"] == 0
        assert proof["duplicates"] == 0, f"nothing was killed, so nothing may come twice (G9): {moves(stage)}"


def test_lag_rises_while_a_subscription_is_paused_and_falls_to_nothing_afterwards(stage: Stage) -> None:
    stage.until_lag(KAFKA)
    stage.set_state(KAFKA, "Paused")
    # The status of a pause may still have the lag of the interval before.
    paused = {"STATUS": "PausedBySpec", "LAG": "0"}
    wait_until(lambda: row(stage, KAFKA), 180, f"{paused}", met=lambda row: paused.items() <= row.items())
    stage.trade(500)
    # Each of the eight writers may commit one more; and above a hundred lag is rounded down to two digits.
    wait_until(lambda: row(stage, KAFKA), 180, "LAG to show what waits", met=lambda row: row["LAG"] == "500")
    stage.until_lag(PUBSUB)
    assert row(stage, KAFKA)["STATUS"] == "PausedBySpec"

    stage.set_state(KAFKA, "Running")
    stage.until_lag(KAFKA)
    stage.until_ready(KAFKA)
    for topic in ("orders", "shop/orders"):
        proof = stage.audit(topic)
        assert wrong_in(proof) == {}, topic
        assert proof["duplicates"] == 0, f"a pause is no crash (G9): {moves(stage)}"


@pytest.mark.parametrize(("name", "sink", "partitions"), [(KAFKA, "kafka", "8"), (PUBSUB, "pubsub", "4")])
def test_kubectl_get_prints_a_row_for_each_subscription(stage: Stage, name: str, sink: str, partitions: str) -> None:
    expected = {
        "NAME": name,
        "READY": "True",
        "SOURCE": "outbox/orders",
        "SINK": sink,
        "PARTITIONS": partitions,
        "LAG": "0",
        "OLDEST": "",
        "DEAD": "0",
        "STATUS": "Delivering",
    }
    printed = wait_until(lambda: row(stage, name), 180, f"{expected}", met=lambda now: expected.items() <= now.items())
    assert printed.keys() - expected.keys() == {"AGE"}


def test_every_partition_is_shown_with_the_pod_that_moves_it(stage: Stage) -> None:
    pods = {pod["metadata"]["name"] for pod in stage.relay_pods()}
    assert len(pods) == 2
    wait_until(
        lambda: stage.status(KAFKA)["partitions"],
        180,
        "two relays to share eight partitions",
        met=lambda shown: (
            [each["partition"] for each in shown] == list(range(8)) and {each["pod"] for each in shown} == pods
        ),
    )


def typed(stage: Stage, command: list[str]) -> str:
    """As a reader would, at the root of the repository, in a namespace of one's own."""
    own = {"shop": stage.namespace}
    program, *arguments = (own.get(word, word).replace("postgresql://…", DATABASE) for word in command)
    assert program == "kubectl", command
    return stage.cluster.kubectl(*(str(ROOT / word) if (ROOT / word).is_file() else word for word in arguments))


def without_figures(printed: list[list[Row]]) -> list[list[Row]]:
    """But for what is another number every time, or none where nothing waits."""
    figures = dict.fromkeys(("AGE", "LAG", "OLDEST"), "…")
    return [[{name: figures.get(name, cell) for name, cell in row.items()} for row in table] for table in printed]


def row(stage: Stage, name: str) -> Row:
    """What ``kubectl get eventsubscriptions`` prints about one."""
    [found] = [row for row in tables(stage.kubectl("get", "eventsubscriptions"))[0] if row["NAME"] == name]
    return found


def moves(stage: Stage) -> list[str]:
    """What the relays told of leases and timeouts, which would explain it."""
    logs = [stage.kubectl("logs", pod["metadata"]["name"]) for pod in stage.relay_pods()]
    return [line for log in logs for line in log.splitlines() if '"level": "info"' not in line]
