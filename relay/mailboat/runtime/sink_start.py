"""Start of a sink: open it, then check the dead-letter topic. Both are retried with back-off.

Without the check, a misspelled topic is reported with the first dead letter, which may be months later. Until the topic
exists, the status and the log report it. Delivery does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging

from mailboat.delivery.backoff import DEAD_TOPIC_BACKOFF, OUTAGE_BACKOFF, Outage
from mailboat.delivery.dead_letter_topic import dead_letter_topic_error
from mailboat.delivery.publish import as_unavailable
from mailboat.delivery.stream import Stream
from mailboat.errors import SinkUnavailable
from mailboat.sinks.protocol import ChecksTopics

log = logging.getLogger(__name__)


async def open_sink(stream: Stream) -> None:
    """Open the sink of a stream. Report each failure in the status and retry."""
    outage = Outage(OUTAGE_BACKOFF)
    while not stream.ready:
        try:
            await stream.sink.open()
            stream.ready, stream.problem = True, None
            stream.health.reachable(stream.clock())
        except Exception as error:  # an unexpected error of a sink must not end the other subscriptions
            reason = error if isinstance(error, SinkUnavailable) else as_unavailable(stream, error)
            stream.health.unavailable(str(reason), stream.clock())
            stream.problem, outage = str(reason), outage.failed()
            await asyncio.sleep(outage.delay(stream.random))


async def await_dead_letter_topic(stream: Stream) -> None:
    """Report a missing dead-letter topic in the status until it exists."""
    topic, sink, dead_topic = stream.dead_letter_topic, stream.sink, stream.dead_topic
    if topic is None or not isinstance(sink, ChecksTopics):
        return
    about = {"subscription": stream.name, "topic": topic}
    outage, problem = Outage(DEAD_TOPIC_BACKOFF), None
    while True:
        try:
            await sink.check_topic(topic)
            break
        except SinkUnavailable as error:
            message = dead_letter_topic_error(error)
            if problem is None:
                log.warning("Dead-letter topic is not available: %s", message, extra=about)
            problem = f"the dead-letter topic {topic} is not available: {message}"
            dead_topic.problem = dead_topic.problem or problem
        outage = outage.failed()
        await asyncio.sleep(outage.delay(stream.random))
    if problem is not None and dead_topic.problem is not None:
        dead_topic.problem = None
        log.info("Dead-letter topic is available", extra=about)
