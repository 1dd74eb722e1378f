"""Delivery policy of a subscription: batches, attempts, backoff and dead letters."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from mailboat_spec.base import Model
from mailboat_spec.formats import NonEmpty
from mailboat_spec.rules import AS_SET
from mailboat_spec.scalars import Duration, between, not_longer


class NoHandler(StrEnum):
    DEAD_LETTER = "DeadLetter"
    IGNORE = "Ignore"


class Backoff(Model):
    """The wait before the next attempt: initial * factor^n, at most max, spread by jitter."""

    constraints = (not_longer("initial", than="max"),)

    initial: Annotated[Duration, between("1ms", "24h")] = Duration.parse("1s")
    """Wait after the first failure, as a duration between 1ms and 24h. Default: 1s."""
    factor: float = Field(default=2.0, strict=True, ge=1, le=100)
    """What each further wait is multiplied by, between 1 and 100. Default: 2."""
    max: Annotated[Duration, between("1ms", "24h")] = Duration.parse("60s")
    """Longest wait, as a duration between 1ms and 24h. Default: 60s."""
    jitter: float = Field(default=0.2, strict=True, ge=0, le=1)
    """How much of a wait is random, as a share between 0 and 1. Default: 0.2."""


class StopAt(Model):
    """Limit of dead letters, so that a faulty deployment does not move a whole topic into the dead-letter topic."""

    consecutive: int = Field(strict=True, ge=1, le=1_000_000)
    """Dead letters in a row, without a handled event between them, that stop the consumer; between 1 and 1000000."""


class DeadLetter(Model):
    """Destination of dead letters. Those of an outbox are always kept in the table mailboat.dead_letters, too."""

    topic: NonEmpty | None = None
    """Topic for dead letters, on the servers of the sink or of the source. Required with relayRef. Default: none, which
    means with source TOPIC.NAME.dead (Pub/Sub: SUBSCRIPTION.NAME.dead)."""
    stop_at: StopAt | None = None
    """Source only: how many dead letters stop the consumer. Default: none, it never stops."""


class Delivery(Model):
    """Delivery policy."""

    batch_size: int | None = Field(default=None, strict=True, ge=1, le=10_000)
    """Events that are read and handed over at once, between 1 and 10000; of a pull sink, those of one transaction.
    Default: none, which means 500, and 100 with a pull sink."""
    max_attempts: int | None = Field(default=None, strict=True, ge=1, le=1000)
    """Attempts before an event that is refused is given up, between 1 and 1000. A destination that is away costs none.
    Default: none, which means 25, and 4 with a pull sink."""
    backoff: Backoff = Field(default_factory=Backoff)
    """Waits between attempts. Default: 1s to 60s."""
    timeout: Annotated[Duration, between("1s", "10m")] = Duration.parse("30s")
    """Time after which an unanswered event counts as not delivered, between 1s and 10m. Default: 30s."""
    on_exhausted: Literal["DeadLetter", "Block"] = "DeadLetter"
    """What happens when attempts are used up: DeadLetter (the key continues) or Block (the key waits for a person).
    Default: DeadLetter."""
    dead_letter: DeadLetter | None = None
    """Where dead letters are sent. Default: none, which means the database only with relayRef, and the default topic
    with source."""
    group_by: tuple[NonEmpty, ...] = Field(default=(), max_length=8, json_schema_extra=AS_SET)
    """Pull sink only: headers, or tags written name=value, whose values make a group; or transaction, the events that
    one transaction wrote. A pull never ends within a group. Default: none, no groups."""
    max_group: int = Field(default=10_000, strict=True, ge=1, le=100_000)
    """Events of one group beyond which a pull fails, between 1 and 100000. Default: 10000."""
    no_handler: NoHandler = NoHandler.DEAD_LETTER
    """What consumers do with an event that no handler is registered for: DeadLetter or Ignore. Default: DeadLetter."""
