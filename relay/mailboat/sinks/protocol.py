"""What a destination must be able to do, and what it must say about itself.

A sink takes a batch of encoded messages and answers per message. It owns its vendor's client and keeps that vendor's
exceptions inside. It never decides about retries, attempts or dead letters: the pump does.

The contract, which ``tests/sinks`` holds every sink to:

- ``publish`` returns once the fate of every message of the batch is known, at the latest after ``delivery timeout``.
  What is still in the client's own queue by then is purged, so that it can't arrive later behind the pump's back.
- The answer is a mapping from the index in the batch to the reason why that message did not arrive. An empty mapping
  means that all of them did.
- ``SinkUnavailable`` costs nobody an attempt. ``EventRefused`` is definite: it is this very message that was refused.
  A sink that only knows that somebody in the batch was refused answers ``Undecided`` for all that did not arrive; the
  pump then tries them one at a time, and for a batch of one the sink must be definite: a message that is refused is
  told so, whatever else is on the way. (A batch of one may still be ``Undecided`` behind another call's failure.)
- ``Traits.stops_behind_failure``: once a message of a key failed, no later message of that key that was already
  handed over arrives either (they come back ``Undecided``), across overlapping ``publish`` calls too, until every
  call that held a message of that key by then has returned. So look at the answers that are there before you hand over
  more. The pump overlaps batches only on such a sink; on others it has at most one message per key on the way.
- Cancelling ``publish`` purges what has not been sent yet. Where the vendor's client can purge only everything, other
  calls on the way may come back ``Undecided``, and those of other sinks that share the client ``SinkUnavailable``.
- A sink that raises nevertheless counts as away, as does one whose ``publish`` is not back ten seconds after the
  delivery timeout: that call is cancelled, and once it has ended, what was in it is sent again.
- ``refusal`` decides without the network what can be decided so (size, characters, count). The pump asks before it
  hands over any message of the batch, so that a message is never sent ahead of its refused sibling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from mailboat.errors import DeliveryError, EventRefused
from mailboat.events import Outgoing

Failures = Mapping[int, DeliveryError]
"""Why which message of a batch did not arrive; empty when all did."""

ALL_DELIVERED: Failures = {}


@dataclass(frozen=True, slots=True)
class Traits:
    """What a sink says about itself before it is opened."""

    header_prefix: str
    """How CloudEvents attributes are spelled there: ``ce_`` on Kafka, ``ce-`` elsewhere."""
    stops_behind_failure: bool
    """Whether a failed message keeps later ones of its key from arriving (see the module's contract)."""
    max_batch_messages: int = 10_000
    max_batch_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a relay gives to every sink it builds."""

    subscription: str
    """``namespace/name``, for client ids and messages."""
    delivery_timeout: float
    """Seconds after which the fate of a message must be known."""
    secrets: Mapping[str, str]
    """The content of the Secret the sink refers to (``configSecretRef``), by key. Never printed."""


class Sink(Protocol):
    """One destination of one subscription, shared by all its partitions that a relay owns."""

    traits: Traits

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        """From the sink's own model (``mailboat_spec``) or, for a third party's, its mapping. Must not connect."""
        ...

    async def open(self) -> None:
        """Connect as far as the vendor's client needs it. Raises ``SinkUnavailable``; may be called again then."""
        ...

    def refusal(self, message: Outgoing) -> EventRefused | None:
        """Why this message can never be taken, as far as can be told without the network."""
        ...

    async def publish(self, batch: Sequence[Outgoing]) -> Failures:
        """Hand over in order, wait for every answer. Never raises ``DeliveryError``: failures are the answer."""
        ...

    async def close(self) -> None:
        """Purge what was not sent, let go of all connections and threads. Safe to call twice."""
        ...
