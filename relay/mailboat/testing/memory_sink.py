"""The memory sink, for tests of applications and of Mailboat.

It stores arrived messages and can simulate faults: be unavailable, refuse the messages that a predicate selects, or
delay its results. It fulfils the whole contract of ``protocol.py`` meanwhile and passes the same suite as other sinks.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Self

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided
from mailboat.model import Message
from mailboat.sinks.key_fence import FenceTicket, KeyFence
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, SinkContext, Traits

DEFAULT_TRAITS: Final = Traits(header_prefix="ce_", stops_behind_failure=True)

Predicate = Callable[[Message], bool]


class MemorySink:
    """Stores every message in ``arrived``, in order of arrival."""

    def __init__(self, *, traits: Traits = DEFAULT_TRAITS, delivery_timeout: float = 30.0) -> None:
        self.traits = traits
        self.arrived: list[Message] = []
        self.publishes = 0
        """Number of batches handed over, successful or not."""
        self.max_value_bytes: int | None = None
        """Size above which ``refusal`` refuses a value."""
        self._delivery_timeout = delivery_timeout
        self._outage: str | None = None
        self._refuses: Predicate | None = None
        self._tells_which = True
        self._accepting = asyncio.Event()
        self._accepting.set()
        self._turn = asyncio.Lock()
        self._stops = KeyFence()
        self._closed = False

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        """Build the sink. ``config`` may contain ``max_value_bytes``."""
        sink = cls(delivery_timeout=context.delivery_timeout)
        if isinstance(config, Mapping):
            sink.max_value_bytes = config.get("max_value_bytes")
        return sink

    # ---- controls for tests ----------------------------------------------------------------------------------------

    def go_away(self, why: str = "told to be away") -> None:
        """Return ``SinkUnavailable`` until :meth:`come_back`."""
        self._outage = why

    def come_back(self) -> None:
        self._outage = None

    def refuse(self, predicate: Predicate | None, *, tells_which: bool = True) -> None:
        """Refuse messages that the predicate selects; None refuses none. With ``tells_which=False`` one refused message
        fails the whole batch, and only a batch of one gets a definite result, as on Kafka."""
        self._refuses = predicate
        self._tells_which = tells_which

    def hold_answers(self) -> None:
        """Accept no message and return no result until :meth:`let_go` or the delivery timeout."""
        self._accepting.clear()

    def let_go(self) -> None:
        self._accepting.set()

    # ---- the protocol ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._outage is not None:
            raise SinkUnavailable(self._outage)
        self._closed = False

    def refusal(self, message: Message) -> EventRefused | None:
        size = len(message.value or b"")
        if self.max_value_bytes is not None and size > self.max_value_bytes:
            return EventRefused(
                f"the value has {size} bytes, the sink takes {self.max_value_bytes}", reason="TooLarge", retryable=False
            )
        return None

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        return self._publish(batch, FenceTicket(self._stops))

    async def _publish(self, batch: Sequence[Message], hold: FenceTicket) -> Failures:
        self.publishes += 1
        with hold:
            try:
                async with asyncio.timeout(self._delivery_timeout), self._turn:
                    await self._accepting.wait()
                    return self._accept(batch, hold)
            except TimeoutError:
                return hold.fail(
                    batch, range(len(batch)), SinkUnavailable(f"no answer within {self._delivery_timeout:g} s")
                )
            except asyncio.CancelledError:
                hold.fail(batch, range(len(batch)), Undecided("cancelled"))
                raise

    async def close(self) -> None:
        self._closed = True
        self._accepting.set()

    def _accept(self, batch: Sequence[Message], hold: FenceTicket) -> Failures:
        hold.begin()
        if self._closed:
            return hold.fail(batch, range(len(batch)), SinkUnavailable("the sink is closed"))
        if self._outage is not None:
            return hold.fail(batch, range(len(batch)), SinkUnavailable(self._outage))
        refused = {index for index, message in enumerate(batch) if self._refuses is not None and self._refuses(message)}
        if refused and not self._tells_which and len(batch) > 1:
            return hold.fail(batch, range(len(batch)), Undecided("a message of this batch was refused"))
        failures: dict[int, DeliveryError] = {}
        for index, message in enumerate(batch):
            if self.traits.stops_behind_failure and message.key in hold.blocked:
                failures[index] = Undecided("an earlier message of its key did not arrive")
            elif index in refused:
                failures[index] = EventRefused("told to refuse it")
            else:
                self.arrived.append(message)
                continue
            hold.stop(message.key)
        return failures or ALL_DELIVERED
