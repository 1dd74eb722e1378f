"""Handing messages over to a sink that may not keep its contract, as a third party's may not.

A sink answers, and does so in time. One that raises instead, or says nothing at all, must neither end the relay nor
stop its partition in silence: it counts as away, which costs no event an attempt and which people are told of.

A call that takes too long is cancelled, which purges what it has not sent, and nothing is sent again before it has
ended. So what it held may arrive twice, as after any answer that got lost, and in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from mailboat.errors import SinkUnavailable
from mailboat.events import Outgoing
from mailboat.pump.stream import Stream
from mailboat.sinks.protocol import Failures

log = logging.getLogger(__name__)

SLACK = 10.0
"""Seconds beyond the delivery timeout after which a sink will not answer any more. A lease outlasts that."""


def hand_over(stream: Stream, messages: Sequence[Outgoing]) -> asyncio.Task[Failures]:
    """The sink's answers. Calls of a sink count in the order in which they are made, so this one is made at once."""
    answers: Coroutine[Any, Any, Failures]
    try:
        answers = stream.sink.publish(messages)
    except Exception as error:
        answers = _raising(error)
    task = asyncio.ensure_future(_answered(stream, answers, len(messages)))
    task.add_done_callback(lambda _: answers.close())  # it may have been cancelled before it began
    return task


async def _raising(error: Exception) -> Failures:
    raise error


async def _answered(stream: Stream, answers: Coroutine[Any, Any, Failures], count: int) -> Failures:
    try:
        async with asyncio.timeout(stream.settings.timeout + SLACK) as patience:
            failures = await answers
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        reason = away(stream, error)  # something inside of the sink was cancelled, and not this call
    except SinkUnavailable as error:
        reason = error
    except TimeoutError as error:
        reason = _no_answer(stream) if patience.expired() else away(stream, error)
    except Exception as error:
        reason = away(stream, error)
    else:
        stream.fault = None
        return failures
    return dict.fromkeys(range(count), reason)


def _no_answer(stream: Stream) -> SinkUnavailable:
    fault = f"the sink gave no answer within {stream.settings.timeout + SLACK:g} s, though it should within less"
    if fault != stream.fault:
        log.error("A delivery was given up: %s.", fault, extra={"subscription": stream.name})
    stream.fault = fault
    return SinkUnavailable(f"{fault}: mend the sink, or raise spec.delivery.timeout")


def away(stream: Stream, error: BaseException) -> SinkUnavailable:
    """What an error that a sink should have kept to itself means. Its traceback is logged the first time."""
    fault = f"{type(error).__name__}: {error}"
    if fault != stream.fault:
        log.error("The sink failed in a way that it should not.", extra={"subscription": stream.name}, exc_info=error)
    stream.fault = fault
    # Its text stays in the log: nobody knows what is in it.
    return SinkUnavailable(f"the sink failed: {type(error).__name__}; the relay's log says where")
