"""What a handler may say about an event, and what that means for the event."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

LONGEST_ERROR: Final = 8 * 1024
"""Characters of a traceback that are kept with a refusal."""


class Ignore(Exception):
    """Raised by a handler: nothing to do. The event counts as handled."""


class Refuse(Exception):
    """Raised by a handler: this event can never be handled. It becomes a dead letter at once."""


class RetryLater(Exception):
    """Raised by a handler: not now. No attempt is counted; the event, and its key behind it, wait so long."""

    def __init__(self, reason: str = "", *, seconds: float = 0, minutes: float = 0, hours: float = 0) -> None:
        super().__init__(reason)
        self.delay = timedelta(seconds=seconds, minutes=minutes, hours=hours)


class CannotDecode(Exception):
    """The payload is not what the handler's annotation says."""


class HasNoHandler(Exception):
    """No handler is registered for the event's type."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is to happen to an event that was not handled. Any source can carry it out."""

    reason: str
    error: str
    final: bool = False
    """No further attempt."""
    counted: bool = True
    """Whether it costs an attempt."""
    retry_in: timedelta | None = None
    """Instead of the subscription's back-off."""


GIVEN_BACK: Final = Refusal("GivenBack", "", counted=False)
"""The consumer could not go on, through no fault of the event."""


def refusal_for(error: BaseException) -> Refusal:
    """The consequence of what a handler raised (``Ignore`` has none: it is not a failure)."""
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
    """The traceback, its end first in importance: where it is too long the beginning is left out."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= LONGEST_ERROR else "...\n" + text[-LONGEST_ERROR:]
