"""The topics of the stories are those that the README tells people to make, and these are what its example wants."""

from __future__ import annotations

import yaml

from readme import ROOT, topics


def test_the_readme_makes_the_topics_that_its_example_sends_to():
    example = (ROOT / "examples" / "kubernetes" / "orders-to-kafka.yaml").read_text(encoding="utf-8")
    [spec] = [each["spec"] for each in yaml.safe_load_all(example) if each["kind"] == "EventSubscription"]
    assert set(topics()) == {spec["sink"]["kafka"]["topic"], spec["delivery"]["deadLetter"]["topic"]}


def test_each_has_partitions():
    assert min(topics().values()) >= 1
