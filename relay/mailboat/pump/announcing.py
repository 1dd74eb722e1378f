"""Telling the dead-letter topic about events that are given up on, before they are dead.

An event is dead only once its notice arrived (or was refused for good): until then it stays parked, doomed, and its key
waits. What must not wait is everything else. So one notice that gets no definite answer stands for all of the
subscription, in all of its partitions: until the topic may be asked again, nobody asks it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mailboat.errors import DeliveryError, EventRefused
from mailboat.pump.delivery import Courier
from mailboat.pump.handing import hand_over
from mailboat.pump.points import Point
from mailboat.pump.stream import DeathNotice, Stream
from mailboat.pump.unexpected import exhausted, is_exhaustion, tell_where

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Announcer:
    """Announces the dead of one partition."""

    stream: Stream
    courier: Courier

    async def told(self, notice: DeathNotice) -> bool:
        """Tells the topic, if there is one. False: it was out of reach, so the event is not dead yet."""
        stream = self.stream
        if stream.announce is None:
            return True
        try:
            message = stream.announce(notice)
            refused = stream.refusal(message)
        except Exception as error:  # nobody could give the event up otherwise, and every relay would die of it
            if is_exhaustion(error):
                self._is_away(exhausted())
                return False
            what = f"Event {notice.event.event_id} is dead, and the dead-letter topic can't be told"
            tell_where(f"{what}; `mailboat dlq show` has it", error, stream.name)
            return True
        if refused is None:
            if stream.clock() < stream.dead_topic.not_before or self.courier.stopping():
                return False
            if not await self.courier.lease_holds():
                return False
            answer = (await hand_over(stream, [message])).get(0)
            stream.passing(Point.DEAD_ANNOUNCED)
            if answer is not None and not isinstance(answer, EventRefused):
                self._is_away(answer)
                return False
            self._is_there()
            refused = answer
        if refused is not None:
            # What is too large for one topic often is for the other. Its key must not wait for that to change.
            log.warning(
                "Event %s is dead, and the dead-letter topic refused it; `mailboat dlq show` has it: %s",
                notice.event.event_id,
                refused,
                extra={"subscription": stream.name},
            )
        return True

    def _is_away(self, answer: DeliveryError) -> None:
        stream, known = self.stream, self.stream.dead_topic
        trouble = f"The dead-letter topic takes nothing, so what is given up on stays parked: {answer}"
        if trouble != known.trouble:
            log.warning("%s", trouble, extra={"subscription": stream.name})
        known.trouble = trouble
        known.outage = known.outage.failed()
        known.not_before = stream.clock() + known.outage.delay(stream.random)

    def _is_there(self) -> None:
        known = self.stream.dead_topic
        if known.trouble is not None:
            log.info("The dead-letter topic takes dead letters again", extra={"subscription": self.stream.name})
        known.trouble, known.outage = None, known.outage.recovered()
