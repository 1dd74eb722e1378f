"""The stories use the topics that the README creates, and these are the topics of its example."""

from __future__ import annotations

import yaml

from readme import ROOT, topics


def test_the_readme_creates_the_topics_of_its_example():
    example = (ROOT / "examples" / "kubernetes" / "orders-to-kafka.yaml").read_text(encoding="utf-8")
    [spec] = [each["spec"] for each in yaml.safe_load_all(example) if each["kind"] == "EventSubscription"]
    assert set(topics()) == {spec["sink"]["kafka"]["topic"], spec["delivery"]["deadLetter"]["topic"]}
