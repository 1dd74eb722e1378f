"""Unexpected errors of an encoder, or of a sink that raises instead of returning results.

No such error may end a relay: the relay has other events and subscriptions, and would hit the same error after a
restart. An error while a message is encoded counts against the event, since it would occur again. The exception is a
lack of memory, which is a problem of the relay and costs no event an attempt.
"""

from __future__ import annotations

import errno
import logging

from mailboat.errors import EventRefused, SinkUnavailable
from mailboat.model import OutboxEvent

log = logging.getLogger(__name__)

CANT_ENCODE = "CantEncode"
"""Failure reason of an event whose encoding failed unexpectedly."""


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
