"""Publication of dead letters to the dead-letter topic.

An event becomes a dead letter only once its notice is acknowledged or definitely refused. Until then the event stays
parked (``pending_dead_letter``), and its key waits. Other keys must not wait. So after one notice without a definite
result, no partition of the subscription publishes to the topic until the back-off has passed.
"""

from __future__ import annotations

import logging
from typing import Final

from mailboat.cloudevents import DeadLetterNotice, dead_letter_message
from mailboat.delivery.backoff import DEAD_TOPIC_BACKOFF
from mailboat.delivery.publish import exhausted, is_exhaustion, log_origin, start_publish
from mailboat.delivery.redelivery import RetryLoop
from mailboat.delivery.stream import Checkpoint, Stream
from mailboat.errors import DeliveryError, EventRefused

log = logging.getLogger(__name__)

_TOPIC_FIELDS: Final = ("spec.sink.kafka.topic", "spec.sink.pubsub.project and topic")
"""Fields that the errors of sinks name for a topic that does not exist."""


def dead_letter_topic_error(error: DeliveryError) -> str:
    """Return the message of a sink's error with the field of the dead-letter topic in it."""
    text = str(error)
    for field in _TOPIC_FIELDS:
        text = text.replace(field, "spec.delivery.deadLetter.topic")
    return text


async def publish_dead_letter(stream: Stream, retry_loop: RetryLoop, notice: DeadLetterNotice) -> bool:
    """Publish a notice if a topic is configured. Return False if the event must stay parked for now.

    This is the case if the topic is unavailable or in back-off, if the worker is stopping, or if memory ran out.
    """
    topic = stream.dead_letter_topic
    if topic is None:
        return True
    try:
        message = dead_letter_message(
            stream.encoder, notice, topic=topic, subscription=stream.name, failed_at=stream.now()
        )
        refused = stream.sink.refusal(message)
    except Exception as error:  # otherwise the event could never be dead-lettered, and every relay would crash
        if is_exhaustion(error):
            _mark_unavailable(stream, exhausted())
            return False
        text = f"Event {notice.event.event_id} is dead, and the dead-letter topic did not get it"
        log_origin(f"{text}; `mailboat dlq show` has it", error, stream.name)
        return True
    if refused is None:
        if stream.clock() < stream.dead_topic.not_before or retry_loop.stopping:
            return False
        if not await retry_loop.lease_holds():
            return False
        answer = (await start_publish(stream, [message])).get(0)
        stream.on_checkpoint(Checkpoint.DEAD_ANNOUNCED)
        if answer is not None and not isinstance(answer, EventRefused):
            _mark_unavailable(stream, answer)
            return False
        if stream.dead_topic.problem is not None:
            log.info("Dead-letter topic is available again", extra={"subscription": stream.name})
        stream.dead_topic.problem, stream.dead_topic.failures = None, 0
        refused = answer
    if refused is not None:
        # An event too large for one topic is often too large for the other. Its key must not wait for a change.
        log.warning(
            "Event %s is dead, and the dead-letter topic refused it; `mailboat dlq show` has it: %s",
            notice.event.event_id,
            refused,
            extra={"subscription": stream.name},
        )
    return True


def _mark_unavailable(stream: Stream, answer: DeliveryError) -> None:
    dead_topic = stream.dead_topic
    message = dead_letter_topic_error(answer)
    problem = f"The dead-letter topic takes nothing, so what is given up on stays parked: {message}"
    if problem != dead_topic.problem:
        log.warning("%s", problem, extra={"subscription": stream.name})
    dead_topic.problem = problem
    dead_topic.failures += 1
    dead_topic.not_before = stream.clock() + DEAD_TOPIC_BACKOFF.delay(dead_topic.failures, stream.random)
