"""Story 5: an event that the destination will never take."""

from __future__ import annotations

import json
from typing import Any

from dead_letters import TOO_LARGE, mailboat, mend_topic, write_poison
from kubectl_table import tables
from namespace import KAFKA, Stage, wrong_in
from support.wait import wait_until

MAX_ATTEMPTS = 6
"""In ``e2e/manifests/to-kafka.yaml``: enough for a replayed event until the relay has heard of the new limit."""


def test_a_refused_event_becomes_a_dead_letter_and_comes_back_on_request(stage: Stage) -> None:
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    stage.trade(200)
    write_poison(stage, "order-7")
    stage.until_status("orders-to-kafka", "dead", 1)
    stage.audit("orders", within=180, lost=1)  # its key goes on without it
    assert shown(stage, "DEAD") == "1"

    [head, letter] = mailboat(stage, "dlq", "list").splitlines()
    assert head.split()[:5] == ["ID", "SUBSCRIPTION", "TYPE", "KEY", "ATTEMPTS"]
    assert letter.split()[1:4] == [f"{stage.namespace}/orders-to-kafka", "order.exported", "order-7"]
    assert "TooLarge" in letter
    notice = dead_letter(stage, "order-7")
    attempts = letter.split()[4]
    # One, or one more where what the relay knew of the topic was too old to give an event up for.
    assert 1 <= int(attempts) <= MAX_ATTEMPTS
    assert notice["mailboat-dead-attempts"] == attempts
    assert notice["mailboat-dead-reason"] == "TooLarge"
    assert notice["payload-bytes"] > TOO_LARGE, "whole: the topic of dead letters takes more than the other"

    mend_topic(stage)
    assert mailboat(stage, "dlq", "replay", "--key", "order-7") == "1 dead letter replayed\n"
    stage.until_status("orders-to-kafka", "dead", 0)
    assert shown(stage, "DEAD") == "0"
    assert mailboat(stage, "dlq", "list") == "no dead letters\n"
    proof = stage.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["received"] == proof["written"]
    assert proof["numbers_left_out"] == 0, "it came back under its own number"


def test_the_topic_of_dead_letters_has_all_that_is_needed_to_understand_one(stage: Stage) -> None:
    """G6."""
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    stage.shop("change", "order-8", "--type", "order.signed", "--header-of-number")
    stage.until_status("orders-to-kafka", "dead", 1)
    notice = dead_letter(stage, "order-8")
    subscription = f"{stage.namespace}/orders-to-kafka"
    assert notice["event_type"] == "order.signed"
    assert (notice["mailboat-dead-reason"], notice["mailboat-dead-subscription"]) == ("InvalidHeaders", subscription)
    assert "tenant" in notice["mailboat-dead-error"]
    assert notice["mailboat-dead-attempts"] == "1", "more would not have made it any better"
    assert notice["payload-bytes"] > 0

    stage.in_postgres("update mailboat.dead_letters set headers = '{}'", "shop")
    assert mailboat(stage, "dlq", "replay", "--key", "order-8") == "1 dead letter replayed\n"
    stage.until_status("orders-to-kafka", "dead", 0)
    proof = stage.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["received"] == proof["written"]


def dead_letter(stage: Stage, order: str) -> dict[str, Any]:
    """The one notice about an order's change, on the topic of dead letters."""

    def notices() -> list[dict[str, Any]]:
        letters = json.loads(stage.shop("headers", "--kafka", KAFKA, "--topic", "orders.dead"))
        return [letter for letter in letters if letter["aggregate_id"] == order]

    [notice] = wait_until(notices, 180, f"the dead letter of {order}")
    return notice


def shown(stage: Stage, column: str) -> str:
    """What ``kubectl get`` prints in a column."""
    [[row]] = tables(stage.kubectl("get", "eventsubscriptions"))
    return row[column]
