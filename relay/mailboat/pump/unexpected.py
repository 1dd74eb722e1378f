"""Errors that nobody planned for: of an encoder, or of a sink that raises where it should answer.

None of them may end a relay: it has other events and other subscriptions, and would meet the same error when it is
started again. What fails while a message is made is that event's fault, since it would fail the same way again. Only a
lack of memory is not: that is the relay's trouble, and costs no event an attempt.
"""

from __future__ import annotations

import errno
import logging

from mailboat.errors import EventRefused, SinkUnavailable
from mailboat.events import Event

log = logging.getLogger(__name__)

CANT_ENCODE = "CantEncode"
"""The reason given to an event of which no message can be made, and nobody foresaw why."""


class Unexpected(Exception):
    """Stands for another error where a traceback is logged: says its class, and not its text, which may hold an event's
    payload."""


def is_exhaustion(error: Exception) -> bool:
    """Whether the relay ran out of memory: with more of it, or fewer events at once, the same would succeed."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def exhausted() -> SinkUnavailable:
    """Nothing can be sent for now, whatever the destination."""
    return SinkUnavailable(
        "the relay has too little memory to make the next message: raise its memory limit; it tries again by itself"
    )


def cant_encode(event: Event, error: Exception, subscription: str) -> EventRefused | SinkUnavailable:
    """Why no message was made of the event. If the event is given up for it, log where it happened."""
    if is_exhaustion(error):
        return exhausted()
    tell_where(f"No message can be made of event {event.event_id}, so it is given up", error, subscription)
    return EventRefused(
        f"no message can be made of event {event.event_id}: {type(error).__name__}; the relay's log says where",
        reason=CANT_ENCODE,
        retryable=False,
    )


def tell_where(what: str, error: Exception, subscription: str) -> None:
    """Logs what happened, with a traceback that has no payload in it."""
    stand_in = Unexpected(type(error).__name__)
    log.error(
        "%s. This should not happen: please report it.",
        what,
        extra={"subscription": subscription},
        exc_info=(Unexpected, stand_in, error.__traceback__),
    )
