"""Outcomes of a handler: the exceptions it may raise, and their consequence for the event."""

import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

LONGEST_ERROR: Final = 8 * 1024
"""Maximum characters of a traceback stored with a refusal."""


class Ignore(Exception):
    """Raised by a handler that has nothing to do. The event counts as handled."""


class Refuse(Exception):
    """Raised by a handler if the event can never be handled. The event becomes a dead letter at once."""


class RetryLater(Exception):
    """Raised by a handler to retry later, at no attempt. The event and later events of its key wait for the delay."""

    def __init__(self, reason: str = "", *, seconds: float = 0, minutes: float = 0, hours: float = 0) -> None:
        super().__init__(reason)
        self.delay = timedelta(seconds=seconds, minutes=minutes, hours=hours)


class CannotDecode(Exception):
    """The payload does not match the handler's annotation."""


class HasNoHandler(Exception):
    """No handler is registered for the event's type."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Consequence for an event that was not handled, independent of the source."""

    reason: str
    error: str
    final: bool = False
    """No further attempt."""
    counted: bool = True
    """True if the refusal costs an attempt."""
    retry_in: timedelta | None = None
    """Delay that replaces the subscription's back-off."""


GIVEN_BACK: Final = Refusal("GivenBack", "", counted=False)
"""The event was returned because the consumer could not continue; the event is not the cause."""


def refusal_for(error: BaseException) -> Refusal:
    """Return the refusal for a handler's exception. ``Ignore`` is not a failure and has none."""
    match error:
        case RetryLater():
            return Refusal("RetryLater", str(error), counted=False, retry_in=error.delay)
        case Refuse():
            return Refusal("Refused", str(error) or "the handler refused it", final=True)
        case CannotDecode():
            return Refusal("CannotDecode", str(error), final=True)
        case HasNoHandler():
            return Refusal("NoHandler", str(error), final=True)
        case _:
            return Refusal("HandlerFailed", bounded_traceback(error))


def bounded_traceback(error: BaseException) -> str:
    """Return the traceback. If it is too long, the beginning is cut, since the end is more useful."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= LONGEST_ERROR else "...\n" + text[-LONGEST_ERROR:]
