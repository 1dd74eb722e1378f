"""The sink protocol: the interface of a destination and the traits that a sink declares.

A sink publishes a batch of encoded messages and returns a result per message. It owns the vendor's client and never
leaks that vendor's exceptions. Retries, attempts and dead letters are decided by the worker, never by the sink.

The contract, which ``tests/sinks`` checks for every sink:

- ``publish`` returns once the result of every message of the batch is known, at the latest after the delivery timeout.
  Messages still in the client's queue by then are purged, so that none arrives after its result was returned.
- The result maps the index in the batch to the reason why that message did not arrive. An empty mapping means that all
  messages arrived.
- ``SinkUnavailable`` costs no attempt. ``EventRefused`` is definite: exactly this message was refused. If the sink
  cannot identify the refused message of a batch, it returns ``Undecided`` for all that did not arrive. The worker then
  retries them one at a time. For a batch of one the sink must be definite: a refused message gets ``EventRefused``,
  regardless of other messages in flight. (A batch of one may still be ``Undecided`` behind another call's failure.)
- ``Traits.stops_behind_failure``: once a message of a key failed, no later message of that key that was already
  handed over arrives either (the result is ``Undecided``). This holds across overlapping ``publish`` calls, until every
  call that held a message of that key at that time has returned. The caller must therefore process available results
  before the next ``publish``. The worker overlaps batches only on such a sink; on others it has at most one message per
  key in flight.
- Cancelling ``publish`` purges unsent messages. If the vendor's client can only purge its whole queue, other calls in
  flight may return ``Undecided``, and calls of other sinks that share the client ``SinkUnavailable``.
- A sink that raises counts as unavailable. So does a sink whose ``publish`` has not returned ten seconds after the
  delivery timeout: the call is cancelled, and after it has ended its messages are sent again.
- ``refusal`` decides everything that needs no network (size, characters, count). The worker calls it before it hands
  over any message of the batch, so that no message is sent ahead of a refused one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from mailboat.errors import DeliveryError, EventRefused
from mailboat.model import Message

Failures = Mapping[int, DeliveryError]
"""Error by index in the batch, for each message that did not arrive; empty if all arrived."""

ALL_DELIVERED: Failures = {}


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a sink that are known before it is opened."""

    header_prefix: str
    """Prefix of CloudEvents attributes: ``ce_`` on Kafka, ``ce-`` elsewhere."""
    stops_behind_failure: bool
    """True if a failed message prevents later messages of its key from arriving (see the module's contract)."""
    max_batch_messages: int = 10_000
    max_batch_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Values that the relay passes to every sink it builds."""

    subscription: str
    """``namespace/name``, for client ids and error messages."""
    delivery_timeout: float
    """Seconds after which the result of a message must be known."""
    secrets: Mapping[str, str]
    """Content of the Secret that the sink references (``configSecretRef``), by key. Never printed."""


class Sink(Protocol):
    """One destination of one subscription, shared by all partitions of the subscription that the relay owns."""

    traits: Traits

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        """Build the sink from its ``mailboat_spec`` model or, for a third-party sink, its mapping. Must not connect."""

    async def open(self) -> None:
        """Connect as far as the vendor's client needs it. Raises ``SinkUnavailable``; the caller may then retry."""

    def refusal(self, message: Message) -> EventRefused | None:
        """Return why this message can never be accepted, as far as that needs no network; otherwise None."""

    async def publish(self, batch: Sequence[Message]) -> Failures:
        """Publish in order and return all failures. Never raises ``DeliveryError``."""

    async def close(self) -> None:
        """Purge unsent messages and release all connections and threads. Safe to call twice."""


@runtime_checkable
class ChecksTopics(Protocol):
    """A sink that can check other topics of its servers, for dead letters. Optional."""

    async def check_topic(self, topic: str) -> None:
        """Raise ``SinkUnavailable`` if the topic does not exist or the servers do not answer."""
