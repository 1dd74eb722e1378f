"""Publishing to a sink that may violate its contract, such as a third-party sink, and errors of the encoder.

A sink must return results within the timeout. If it raises or does not return, the relay must not end and the partition
must not stop unnoticed. The sink then counts as unavailable, which costs no event an attempt and is reported. An error
of the encoder counts against the event, since it would occur again, unless the relay lacks memory.

A call that exceeds the timeout is cancelled, which purges its unsent messages. Nothing is sent again before the call
has ended. So its messages may arrive twice, as after any lost acknowledgement, but in order (G9).
"""

import asyncio
import errno
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from mailboat.delivery.stream import Stream
from mailboat.errors import EventRefused, SinkUnavailable
from mailboat.model import Message, OutboxEvent
from mailboat.sinks.protocol import Failures

log = logging.getLogger(__name__)

SLACK = 10.0
"""Seconds beyond the delivery timeout after which a call is cancelled."""
CANT_ENCODE = "CantEncode"
"""Failure reason of an event whose encoding failed unexpectedly."""


def start_publish(stream: Stream, messages: Sequence[Message]) -> asyncio.Future[Failures]:
    """Publish messages and return a future of the results. ``publish`` is called at once, to keep the call order."""
    stream.meters.batch.observe(len(messages))
    try:
        answers = stream.sink.publish(messages)
    except Exception as error:
        return resolved(dict.fromkeys(range(len(messages)), as_unavailable(stream, error)))
    task = asyncio.ensure_future(_answered(stream, answers, len(messages)))
    task.add_done_callback(lambda _: answers.close())  # the task may be cancelled before its first step
    return task


def resolved(failures: Failures) -> asyncio.Future[Failures]:
    """Return the future of results that are known without a call."""
    answer = asyncio.get_running_loop().create_future()
    answer.set_result(failures)
    return answer


async def _answered(stream: Stream, answers: Coroutine[Any, Any, Failures], count: int) -> Failures:
    try:
        async with asyncio.timeout(stream.settings.timeout + SLACK) as deadline:
            failures = await answers
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # otherwise a task inside the sink was cancelled, not this call
        late = isinstance(error, TimeoutError) and deadline.expired()
        return dict.fromkeys(range(count), _no_answer(stream) if late else as_unavailable(stream, error))
    stream.fault = None
    return failures


def _no_answer(stream: Stream) -> SinkUnavailable:
    fault = f"the sink gave no answer within {stream.settings.timeout + SLACK:g} s, though it should within less"
    if fault != stream.fault:
        log.error("Delivery cancelled: %s", fault, extra={"subscription": stream.name})
    stream.fault = fault
    return SinkUnavailable(f"{fault}: correct the sink, or raise spec.delivery.timeout")


def as_unavailable(stream: Stream, error: BaseException) -> SinkUnavailable:
    """Convert an unexpected error of a sink to ``SinkUnavailable``. Log its traceback the first time."""
    if isinstance(error, SinkUnavailable):
        return error
    fault = f"{type(error).__name__}: {error}"
    if fault != stream.fault:
        log.error("Sink failed unexpectedly", extra={"subscription": stream.name}, exc_info=error)
    stream.fault = fault
    # The text of the error stays in the log, because it may contain anything.
    return SinkUnavailable(f"the sink failed: {type(error).__name__}; the relay's log says where")


class Unexpected(Exception):
    """Replacement for another error in a logged traceback. It carries the class name but not the text, which may
    contain an event's payload."""


def exhaustion(error: Exception) -> SinkUnavailable | None:
    """If the relay ran out of memory, return the error, which affects every destination. With more memory or fewer
    events the same call would succeed."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return SinkUnavailable(
            "the relay has too little memory to make the next message: raise its memory limit; it tries again by itself"
        )
    return None


def cant_encode(event: OutboxEvent, error: Exception, subscription: str) -> EventRefused | SinkUnavailable:
    """Return the reason why an event can't be encoded. If the event is refused for it, log the traceback."""
    if (unavailable := exhaustion(error)) is not None:
        return unavailable
    log_origin(f"No message can be made of event {event.event_id}, so it is given up", error, subscription)
    return EventRefused(
        f"no message can be made of event {event.event_id}: {type(error).__name__}; the relay's log says where",
        reason=CANT_ENCODE,
        retryable=False,
    )


def log_origin(what: str, error: Exception, subscription: str) -> None:
    """Log an error with a traceback that contains no payload."""
    stand_in = Unexpected(type(error).__name__)
    log.error(
        "%s. This should not happen: please report it.",
        what,
        extra={"subscription": subscription},
        exc_info=(Unexpected, stand_in, error.__traceback__),
    )
