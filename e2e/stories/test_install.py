"""Story 1: the README's section about Kubernetes: install, apply, deliver.

The test runs the commands of the README with another namespace, other images and another database URL. The first of
them, ``helm install``, has installed the release of all stories (``helm_release.py``).
"""

from __future__ import annotations

import json

import pytest

from helm_release import Installed
from kubectl_table import Row, tables
from namespace import DATABASE, StoryNamespace, violations
from readme import ROOT, commands, status_command, status_output
from support.locks import locked
from support.wait import wait_until

EVENTS = 10_000
INSTALLED = """
import importlib.metadata, json, re
found = importlib.metadata.distributions()
print(json.dumps({re.sub("[-_.]+", "-", each.name).lower(): each.version for each in found}))
"""
KAFKA, PUBSUB = "orders-to-kafka", "orders-to-pubsub"


def test_helm_test_succeeds(mailboat: Installed) -> None:
    [phase] = [line.split()[1] for line in mailboat.test().splitlines() if line.startswith("Phase:")]
    assert phase == "Succeeded"


def test_the_commands_of_the_readme_lead_to_the_output_of_the_readme(story: StoryNamespace) -> None:
    _, namespace, *rest = commands()
    assert namespace == ["kubectl", "create", "namespace", "shop"]  # the fixture has created one
    for command in rest:
        run_documented(story, command)
    story.until_ready("orders", kind="outboxrelay")
    story.until_ready(KAFKA)
    with story.trading():
        wait_until(
            lambda: tables(run_documented(story, status_command())),
            180,
            "kubectl to print the output of the README",
            met=lambda printed: without_figures(printed) == without_figures(tables(status_output())),
        )


@pytest.mark.parametrize("image", ["operator", "relay"])
def test_an_image_holds_the_packages_of_its_lock_and_no_others(
    image: str, story: StoryNamespace, mailboat: Installed
) -> None:
    pods = mailboat.operators() if image == "operator" else story.all("pods", "mailboat.dev/relay=orders")
    metadata = pods[0]["metadata"]
    where = ("--namespace", metadata["namespace"], metadata["name"])
    installed = json.loads(story.cluster.kubectl("exec", *where, "--", "python", "-c", INSTALLED))
    own = {name for name in installed if name.startswith("mailboat")}
    assert own == {"mailboat-spec", "mailboat-operator" if image == "operator" else "mailboat"}
    assert {name: version for name, version in installed.items() if name not in own}.items() <= locked(image).items()


def test_ten_thousand_events_arrive_at_both_destinations_in_order(story: StoryNamespace) -> None:
    story.apply("pubsub")
    story.kubectl("rollout", "status", "deployment/pubsub", "--timeout=180s")
    story.prepare("--pubsub-topic", "shop/orders")
    story.apply("to-pubsub")
    story.until_ready(PUBSUB)
    story.trade(EVENTS)
    for topic in ("orders", "shop/orders"):
        proof = story.audit(topic)
        assert violations(proof) == {}, topic
        assert proof["received"] == proof["written"] >= EVENTS
        assert proof["numbers_left_out"] == 0
        assert proof["duplicates"] == 0, f"duplicates without a crash (G9): {relay_warnings(story)}"


def test_lag_rises_during_a_pause_and_falls_to_zero_after_it(story: StoryNamespace) -> None:
    story.until_lag(KAFKA)
    story.set_state(KAFKA, "Paused")
    # The first status of a pause may have the lag of the previous interval.
    paused = {"STATUS": "PausedBySpec", "LAG": "0"}
    wait_until(lambda: row(story, KAFKA), 180, f"{paused}", met=lambda row: paused.items() <= row.items())
    story.trade(500)
    # Each of the eight writers may commit one more, and a lag above 100 is rounded down to two digits.
    wait_until(lambda: row(story, KAFKA), 180, "a LAG of 500", met=lambda row: row["LAG"] == "500")
    story.until_lag(PUBSUB)
    assert row(story, KAFKA)["STATUS"] == "PausedBySpec"

    story.set_state(KAFKA, "Running")
    story.until_lag(KAFKA)
    story.until_ready(KAFKA)
    for topic in ("orders", "shop/orders"):
        proof = story.audit(topic)
        assert violations(proof) == {}, topic
        assert proof["duplicates"] == 0, f"duplicates after a pause (G9): {relay_warnings(story)}"


@pytest.mark.parametrize(("name", "sink", "partitions"), [(KAFKA, "kafka", "8"), (PUBSUB, "pubsub", "4")])
def test_kubectl_get_prints_a_row_for_each_subscription(
    story: StoryNamespace, name: str, sink: str, partitions: str
) -> None:
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
    printed = wait_until(lambda: row(story, name), 180, f"{expected}", met=lambda now: expected.items() <= now.items())
    assert printed.keys() - expected.keys() == {"AGE"}


def test_the_status_lists_every_partition_with_its_pod(story: StoryNamespace) -> None:
    pods = {pod["metadata"]["name"] for pod in story.relay_pods()}
    assert len(pods) == 2
    wait_until(
        lambda: story.status(KAFKA)["partitions"],
        180,
        "two relays to share eight partitions",
        met=lambda shown: (
            [each["partition"] for each in shown] == list(range(8)) and {each["pod"] for each in shown} == pods
        ),
    )


def run_documented(story: StoryNamespace, command: list[str]) -> str:
    """Run a command of the README from the root of the repository, in the namespace of the story."""
    own = {"shop": story.namespace}
    program, *arguments = (own.get(word, word).replace("postgresql://…", DATABASE) for word in command)
    assert program == "kubectl", command
    return story.cluster.kubectl(*(str(ROOT / word) if (ROOT / word).is_file() else word for word in arguments))


def without_figures(printed: list[list[Row]]) -> list[list[Row]]:
    """Mask the columns whose values vary."""
    figures = dict.fromkeys(("AGE", "LAG", "OLDEST"), "…")
    return [[{name: figures.get(name, cell) for name, cell in row.items()} for row in table] for table in printed]


def row(story: StoryNamespace, name: str) -> Row:
    """The row of one subscription in ``kubectl get eventsubscriptions``."""
    [found] = [row for row in tables(story.kubectl("get", "eventsubscriptions"))[0] if row["NAME"] == name]
    return found


def relay_warnings(story: StoryNamespace) -> list[str]:
    """Warnings and errors in the relays' logs, such as lost leases and time-outs."""
    logs = [story.kubectl("logs", pod["metadata"]["name"]) for pod in story.relay_pods()]
    return [line for log in logs for line in log.splitlines() if '"level": "info"' not in line]
