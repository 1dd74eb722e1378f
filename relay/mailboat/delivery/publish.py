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


def start_publish(stream: Stream, messages: Sequence[Message]) -> asyncio.Task[Failures]:
    """Publish messages and return a task for the results. ``publish`` is called at once, to keep the call order."""
    stream.meters.batch.observe(len(messages))
    answers: Coroutine[Any, Any, Failures]
    try:
        answers = stream.sink.publish(messages)
    except Exception as error:
        answers = _raise(error)
    task = asyncio.ensure_future(_answered(stream, answers, len(messages)))
    task.add_done_callback(lambda _: answers.close())  # the task may be cancelled before its first step
    return task


async def _raise(error: Exception) -> Failures:
    raise error


async def _answered(stream: Stream, answers: Coroutine[Any, Any, Failures], count: int) -> Failures:
    try:
        async with asyncio.timeout(stream.settings.timeout + SLACK) as deadline:
            failures = await answers
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        reason = as_unavailable(stream, error)  # a task inside the sink was cancelled, not this call
    except SinkUnavailable as error:
        reason = error
    except TimeoutError as error:
        reason = _no_answer(stream) if deadline.expired() else as_unavailable(stream, error)
    except Exception as error:
        reason = as_unavailable(stream, error)
    else:
        stream.fault = None
        return failures
    return dict.fromkeys(range(count), reason)


def _no_answer(stream: Stream) -> SinkUnavailable:
    fault = f"the sink gave no answer within {stream.settings.timeout + SLACK:g} s, though it should within less"
    if fault != stream.fault:
        log.error("Delivery cancelled: %s", fault, extra={"subscription": stream.name})
    stream.fault = fault
    return SinkUnavailable(f"{fault}: correct the sink, or raise spec.delivery.timeout")


def as_unavailable(stream: Stream, error: BaseException) -> SinkUnavailable:
    """Convert an unexpected error of a sink to ``SinkUnavailable``. Log its traceback the first time."""
    fault = f"{type(error).__name__}: {error}"
    if fault != stream.fault:
        log.error("Sink failed unexpectedly", extra={"subscription": stream.name}, exc_info=error)
    stream.fault = fault
    # The text of the error stays in the log, because it may contain anything.
    return SinkUnavailable(f"the sink failed: {type(error).__name__}; the relay's log says where")


class Unexpected(Exception):
    """Replacement for another error in a logged traceback. It carries the class name but not the text, which may
    contain an event's payload."""


def is_exhaustion(error: Exception) -> bool:
    """Return whether the relay ran out of memory. With more memory or fewer events the same call would succeed."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def exhausted() -> SinkUnavailable:
    """Return the error for a lack of memory, which affects every destination."""
    return SinkUnavailable(
        "the relay has too little memory to make the next message: raise its memory limit; it tries again by itself"
    )


def cant_encode(event: OutboxEvent, error: Exception, subscription: str) -> EventRefused | SinkUnavailable:
    """Return the reason why an event can't be encoded. If the event is refused for it, log the traceback."""
    if is_exhaustion(error):
        return exhausted()
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
