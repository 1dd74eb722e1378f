"""An event that its topic will never take, and what a person does about it: the CLI, where the docs say to run it."""

from __future__ import annotations

from namespace import KAFKA, Stage

TOO_LARGE = 60_000
"""Bytes; the topic of the stories takes 40,000."""


def write_poison(stage: Stage, order: str) -> None:
    """One change that is refused, and three of the same order behind it."""
    stage.shop("change", order, "--type", "order.exported", "--filler", str(TOO_LARGE))
    stage.shop("change", order, "--count", "3")


def mend_topic(stage: Stage) -> None:
    stage.shop("resize", "--kafka", KAFKA, "--topic", "orders", "--largest", str(2 * TOO_LARGE))


def mailboat(stage: Stage, *arguments: str) -> str:
    """What the CLI prints inside a relay's pod."""
    return stage.kubectl("exec", "deployment/orders-relay", "--", "mailboat", *arguments)
