"""The sink of pull subscriptions: a placeholder, since consumers pull the events from the database."""

from collections.abc import Sequence
from typing import Any, Self

from mailboat.errors import EventRefused
from mailboat.model import Message
from mailboat.sinks.protocol import Failures, SinkContext, Traits


class PullSink:
    """``publish`` is never called: relays own no partition of pull subscriptions, and only report their lag."""

    traits = Traits(header_prefix="ce_", stops_behind_failure=True)

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        return cls()

    async def open(self) -> None:
        """Do nothing: there is no connection."""

    def refusal(self, message: Message) -> EventRefused | None:
        return None

    async def publish(self, batch: Sequence[Message]) -> Failures:
        raise NotImplementedError("a relay delivers nothing of a pull subscription")

    async def close(self) -> None:
        """Do nothing: there is no connection."""
