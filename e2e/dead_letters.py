"""An event that the broker refuses, and its replay with the CLI as the docs describe it."""

from __future__ import annotations

from namespace import KAFKA, StoryNamespace

TOO_LARGE = 60_000
"""Bytes; the limit of the topic is 40,000."""


def write_poison(story: StoryNamespace, order: str) -> None:
    """Write an event that the broker refuses, and three events of the same key after it."""
    story.shop("change", order, "--type", "order.exported", "--filler", str(TOO_LARGE))
    story.shop("change", order, "--count", "3")


def raise_topic_limit(story: StoryNamespace) -> None:
    story.shop("resize", "--kafka", KAFKA, "--topic", "orders", "--largest", str(2 * TOO_LARGE))


def mailboat_cli(story: StoryNamespace, *arguments: str) -> str:
    """Run the CLI inside a relay's pod and return its output."""
    return story.kubectl("exec", "deployment/orders-relay", "--", "mailboat", *arguments)
