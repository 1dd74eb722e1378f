"""Number of dead letters on a Kafka topic that have not been replayed, as listed by ``mailboat dlq list``.

A replay without filters commits the offsets of its consumer group, which reduces the number. Pub/Sub has no request for
such a number.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from mailboat.consumer.broker.engine import BrokerEngine
from mailboat.consumer.broker.kafka_dead_letters import KafkaLetters
from mailboat.errors import SinkUnavailable
from mailboat.sinks.daemon_thread import in_a_thread

_EVERY: Final = 15.0
_CHECK_EVERY: Final = 1.0
"""Seconds between two checks of the engine. A dead letter of this process causes a count without further delay."""
_REQUEST: Final = 5.0


class WaitingLetters:
    """The number as of the last count. ``run`` counts until cancelled."""

    def __init__(self, client: Mapping[str, Any], topic: str, group: str) -> None:
        """``client``: settings of librdkafka. ``group``: where replays store their progress."""
        self._letters = KafkaLetters(client, topic, group, _REQUEST)
        self.count: int | None = None
        """None before the first count."""

    async def run(self, engine: BrokerEngine) -> None:
        loop, written, due = asyncio.get_running_loop(), 0, 0.0
        while True:
            state = engine.state()
            if state.source.connected and (loop.time() >= due or engine.counts.dead != written):
                written, due = engine.counts.dead, loop.time() + _EVERY
                await self._update()
            await asyncio.sleep(_CHECK_EVERY)

    async def _update(self) -> None:
        measuring = in_a_thread(self._measure, "dead-letters")
        try:
            self.count = await asyncio.shield(measuring)
        except SinkUnavailable:
            pass  # the engine reports an unavailable topic when it has a dead letter
        except asyncio.CancelledError:
            await asyncio.wait([measuring])
            raise

    def _measure(self) -> int:
        with self._letters as letters:
            return letters.waiting()
