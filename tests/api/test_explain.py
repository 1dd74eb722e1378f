"""``kubectl explain`` as documentation: every field has a sentence with its unit and default."""

from __future__ import annotations

import pytest

from mailboat_devservers.kubernetes import ApiServer
from support.wait import wait_until

SINK = """\
GROUP:      mailboat.dev
KIND:       EventSubscription
VERSION:    v1alpha1

FIELD: sink <Object>


DESCRIPTION:
    Where events go: exactly one kind of destination. Passwords and other
    secrets never stand here, each kind refers to Secrets of the same namespace
    instead. The destination can be changed later: progress is kept, and the
    next events go to the new one.

FIELDS:
  custom <Object>
    A sink of a third party, installed in the relay's image and found by its
    entry point. Default: none.

  http <Object>
    A webhook: one POST per event, signed where signingSecretRef says so. 2xx is
    success, Retry-After is respected, 410 Gone pauses the subscription. Not in
    this release. Default: none.

  kafka <Object>
    A topic of Apache Kafka, or of anything that speaks its protocol (Redpanda,
    Event Hubs, ...). Key order is kept by Kafka's own partitions: the event's
    key is the message's key. Default: none.

  log <Object>
    JSON lines on the relay's standard output or in a file, for trying things
    out; written log: {}. Default: none.

  postgres <Object>
    A table in another Postgres database: one row per event. Not in this
    release. Default: none.

  pubsub <Object>
    A topic of Google Cloud Pub/Sub. The event's key is the ordering key;
    subscriptions must have message ordering enabled to make use of it. Default:
    none.

  pull <Object>
    Nowhere: consumers take the events out of the database with mailboat.pull,
    in the transaction of their effects. Relays only report the lag. Written
    pull: {}. Default: none.

  redis <Object>
    A stream of Redis or Valkey: one XADD per event. Not in this release.
    Default: none.
"""

ENDING = """\
  onExhausted <string>
  enum: DeadLetter, Block
    What happens when attempts are used up: DeadLetter (the key goes on) or
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


def test_a_sink_is_explained(explaining: ApiServer) -> None:
    assert explained(explaining, "eventsubscription.spec.sink") == SINK


def test_choices_are_explained(explaining: ApiServer) -> None:
    assert ENDING in explained(explaining, "evs.spec.delivery")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("eventsubscription", "One stream of events."),
        ("evs.spec.sink.kafka.bootstrapServers", "Brokers to ask first, each as host:port."),
        ("evs.status.partitions", "Who holds which partition."),
        ("outboxrelay", "One outbox, and the relays that serve it."),
        ("obr.spec.outbox.retention.maxBytes", "Drop only: size of the outbox"),
        ("obr.status.conditions", "Conditions, at most one of each type."),
    ],
)
def test_every_level_is_explained(explaining: ApiServer, path: str, words: str) -> None:
    assert words in " ".join(explained(explaining, path).split())
