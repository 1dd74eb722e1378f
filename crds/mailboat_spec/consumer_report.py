"""Answer of a consumer's ``GET /status``: written by the consumer kit, read by the operator and ``mailboat status``.

The reader may be older or newer than the writer, so unknown fields are ignored and every field but the name has a
default. Texts and lists are cut to a maximum size by both ends, because the operator keeps the last answer of each pod.
"""

from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mailboat_spec.relay_status import WIRE

MOST_PARTITIONS: Final = 256
"""Partitions that one consumer lists. Sums cover all of them."""
LARGEST_REPORT: Final = 128 * 1024
"""In bytes."""


def _cut(most: int) -> BeforeValidator:
    return BeforeValidator(lambda value: value[:most] if isinstance(value, str | list | tuple) else value)


Text = Annotated[str, _cut(1024)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]


class _Wire(BaseModel):
    model_config = ConfigDict(**WIRE, serialize_by_alias=True, frozen=True)


class ConsumedPartition(_Wire):
    """A partition of the source that the reporting process owns."""

    partition: Count
    lag: Count | None = None
    """Messages that are not committed; None if unknown."""
    oldest_age: Seconds | None = None
    paused: bool = False
    """Reading is paused, because too many events wait behind an unfinished one."""


class SourceHealth(_Wire):
    """The broker, as the reporting process sees it."""

    kind: Text = ""
    """kafka or pubsub."""
    reachable: bool = True
    error: Text | None = None
    owned: Count = 0
    """Number of partitions that this process owns."""
    partitions: Annotated[tuple[ConsumedPartition, ...], _cut(MOST_PARTITIONS)] = ()


class StoreHealth(_Wire):
    """The store of handled events."""

    kind: Text = ""
    """redis or postgres."""
    reachable: bool = True
    error: Text | None = None
    doubt: Text | None = None
    """Why the store may forget handled events: EvictsKeys, MemoryLost, NotReplicated; None if it is reliable."""
    doubt_message: Text = ""


class DeadLetterHealth(_Wire):
    """The dead-letter topic."""

    topic: Text = ""
    reachable: bool = True
    error: Text | None = None
    stopped: bool = False
    """``delivery.deadLetter.stopAt`` stopped the consumer."""
    waiting: Count | None = None
    """Dead letters on the topic that no replay has passed, those of other consumers of the subscription included; None
    if unknown, or if the broker does not tell (Pub/Sub)."""


class ConsumerReport(_Wire):
    """One consumer in one process.

    Without ``source`` the consumer pulls from an outbox; then lag, parked and dead cover the whole subscription.
    Otherwise lag and parked cover the partitions of this process; dead covers the whole dead-letter topic or, if the
    broker does not tell, the dead letters that this process wrote.
    """

    name: Text
    """namespace/name of the subscription."""
    instance: Text = ""
    state: Text = ""
    """Connecting, Running, Paused or Stopping."""
    message: Text = ""
    workers: Count = 0
    """Pull: connections that handle events. Source: handlers that run now."""
    lag: Count = 0
    lag_bounded: bool = False
    oldest_age: Seconds | None = None
    parked: Count = 0
    dead: Count = 0
    handled: Count = 0
    """Count since the process started, as are ``ignored``, ``refused`` and ``redelivered``."""
    ignored: Count = 0
    refused: Count = 0
    redelivered: Count = 0
    duplicates: Count = 0
    """Source only: events skipped because they were done."""
    takeovers: Count = 0
    """Source only: events whose earlier consumer died."""
    overlaps: Count = 0
    """Source only: results that came after another consumer had taken over the event."""
    unclaimed: Count = 0
    """Source only: events handled without the store (``onUnavailable: Handle``)."""
    last_error: Text | None = None
    source: SourceHealth | None = None
    idempotency: StoreHealth | None = None
    dead_letters: DeadLetterHealth | None = None


class ConsumerReports(_Wire):
    """The whole answer."""

    consumers: Annotated[tuple[ConsumerReport, ...], Field(max_length=64)] = ()


def read_consumer_reports(content: bytes) -> tuple[ConsumerReport, ...] | None:
    """Parse an answer; None if it is not the status of a consumer."""
    try:
        return ConsumerReports.model_validate_json(content).consumers
    except (ValidationError, RecursionError):
        return None
