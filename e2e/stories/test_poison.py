"""Story 5: an event that the broker refuses."""

from __future__ import annotations

import json
from typing import Any

from kubectl_table import tables
from namespace import KAFKA, StoryNamespace, violations
from support.wait import wait_until

TOO_LARGE = 60_000
"""Bytes; the limit of the topic is 40,000."""
MAX_ATTEMPTS = 6
"""Of ``e2e/manifests/to-kafka.yaml``: enough until the relay has read the new size limit of the topic."""


def test_a_refused_event_becomes_a_dead_letter_and_can_be_replayed(story: StoryNamespace) -> None:
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    story.trade(200)
    story.shop("change", "order-7", "--type", "order.exported", "--filler", str(TOO_LARGE))
    story.shop("change", "order-7", "--count", "3")
    story.until_status("orders-to-kafka", "dead", 1)
    story.audit("orders", within=180, lost=1)  # later events of its key are delivered
    assert shown(story, "DEAD") == "1"

    [head, letter] = mailboat_cli(story, "dlq", "list").splitlines()
    assert head.split()[:5] == ["ID", "SUBSCRIPTION", "TYPE", "KEY", "ATTEMPTS"]
    assert letter.split()[1:4] == [f"{story.namespace}/orders-to-kafka", "order.exported", "order-7"]
    assert "TooLarge" in letter
    notice = dead_letter(story, "order-7")
    attempts = letter.split()[4]
    # One, or two if the relay first had to refresh its outdated size limit of the topic.
    assert 1 <= int(attempts) <= MAX_ATTEMPTS
    assert notice["mailboat-dead-attempts"] == attempts
    assert notice["mailboat-dead-reason"] == "TooLarge"
    assert notice["payload-bytes"] > TOO_LARGE, "the payload is cut, although the limit of this topic is larger"

    story.shop("resize", "--kafka", KAFKA, "--topic", "orders", "--largest", str(2 * TOO_LARGE))
    assert mailboat_cli(story, "dlq", "replay", "--key", "order-7") == "1 dead letter replayed\n"
    story.until_status("orders-to-kafka", "dead", 0)
    assert shown(story, "DEAD") == "0"
    assert mailboat_cli(story, "dlq", "list") == "no dead letters\n"
    proof = story.audit("orders")
    assert violations(proof) == {}
    assert proof["received"] == proof["written"]
    assert proof["numbers_left_out"] == 0, "the replayed event has another number"


def test_a_message_of_the_dead_letter_topic_has_reason_error_attempts_and_payload(story: StoryNamespace) -> None:
    """G6."""
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    story.shop("change", "order-8", "--type", "order.signed", "--header-of-number")
    story.until_status("orders-to-kafka", "dead", 1)
    notice = dead_letter(story, "order-8")
    subscription = f"{story.namespace}/orders-to-kafka"
    assert notice["ce_type"] == "order.signed"
    assert (notice["mailboat-dead-reason"], notice["mailboat-dead-subscription"]) == ("InvalidHeaders", subscription)
    assert "tenant" in notice["mailboat-dead-error"]
    assert notice["mailboat-dead-attempts"] == "1", "invalid headers were retried"
    assert notice["payload-bytes"] > 0

    story.in_postgres("update mailboat.dead_letters set headers = '{}'", "shop")
    assert mailboat_cli(story, "dlq", "replay", "--key", "order-8") == "1 dead letter replayed\n"
    story.until_status("orders-to-kafka", "dead", 0)
    proof = story.audit("orders")
    assert violations(proof) == {}
    assert proof["received"] == proof["written"]


def dead_letter(story: StoryNamespace, order: str) -> dict[str, Any]:
    """The only message about an order on the dead-letter topic."""

    def notices() -> list[dict[str, Any]]:
        letters = json.loads(story.shop("headers", "--kafka", KAFKA, "--topic", "orders.dead"))
        return [letter for letter in letters if letter["ce_subject"] == order]

    [notice] = wait_until(notices, 180, f"the dead letter of {order}")
    return notice


def shown(story: StoryNamespace, column: str) -> str:
    """A cell of ``kubectl get eventsubscriptions``."""
    [[row]] = tables(story.kubectl("get", "eventsubscriptions"))
    return row[column]


def mailboat_cli(story: StoryNamespace, *arguments: str) -> str:
    """Run the CLI inside a relay's pod, as the docs describe it, and return its output."""
    return story.kubectl("exec", "deployment/orders-relay", "--", "mailboat", *arguments)
