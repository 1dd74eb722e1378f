"""``kubectl explain`` as documentation: every field has a sentence with its unit and default."""

from __future__ import annotations

import pytest

from mailboat_devservers.kubernetes import ApiServer
from support.wait import wait_until

ENDING = """\
  onExhausted <string>
  enum: DeadLetter, Block
    What happens when attempts are used up: DeadLetter (the key continues) or
    Block (the key waits for a person). Default: DeadLetter.
"""


@pytest.fixture(scope="module")
def explaining(api: ApiServer) -> ApiServer:
    """The server after it published the schemas of the new kinds, which happens shortly after it serves them."""
    paths = ("eventsubscription.spec", "outboxrelay.spec")
    wait_until(lambda: all("FIELDS:" in api.try_kubectl("explain", path).out for path in paths), what="explanations")
    return api


def explained(api: ApiServer, path: str) -> str:
    """Return the output of `kubectl explain` with spaces for tabs and without trailing blanks."""
    lines = (line.rstrip().replace("\t", " ") for line in api.kubectl("explain", path).splitlines())
    return "\n".join(lines).rstrip() + "\n"


def test_choices_are_explained(explaining: ApiServer) -> None:
    assert ENDING in explained(explaining, "evs.spec.delivery")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("eventsubscription", "One stream of events."),
        ("eventsubscription.spec.sink", "Where events go: exactly one kind of destination."),
        ("evs.spec.sink.kafka.bootstrapServers", "Brokers to ask first, each as host:port."),
        ("evs.status.partitions", "Who holds which partition."),
        ("outboxrelay", "One outbox, and the relays that serve it."),
        ("obr.spec.outbox.retention.maxBytes", "Drop only: size of the outbox"),
        ("obr.status.conditions", "Conditions, at most one of each type."),
    ],
)
def test_every_level_is_explained(explaining: ApiServer, path: str, words: str) -> None:
    assert words in " ".join(explained(explaining, path).split())
