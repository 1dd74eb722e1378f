"""Google's limits as constants, and the pure functions that apply them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from mailboat.errors import EventRefused
from mailboat.model import Message

MAX_REQUEST_BYTES: Final = 10_000_000
GOOD_REQUEST_BYTES: Final = 4_000_000
"""Size at which requests are split. Larger ones gain nothing; gRPC servers (also Google's fake) default to 4 MiB."""
MAX_REQUEST_MESSAGES: Final = 1_000
MAX_ATTRIBUTES: Final = 100
MAX_ATTRIBUTE_NAME_BYTES: Final = 256
MAX_ATTRIBUTE_VALUE_BYTES: Final = 1024
MAX_ORDERING_KEY_BYTES: Final = 1024
_RESERVED_PREFIX: Final = "goog"

_REQUEST_OVERHEAD: Final = 1024  # topic name and framing
_MESSAGE_OVERHEAD: Final = 64
_ATTRIBUTE_OVERHEAD: Final = 16


def refusal(message: Message) -> EventRefused | None:
    """Return why Pub/Sub can never accept this message; None if it can."""
    if message.key is not None and _size(message.key) > MAX_ORDERING_KEY_BYTES:
        return _refused(f"its key has more than {MAX_ORDERING_KEY_BYTES} bytes", "KeyTooLong")
    if len(message.headers) > MAX_ATTRIBUTES:
        return _refused(f"it has {len(message.headers)} attributes, more than {MAX_ATTRIBUTES}", "TooManyHeaders")
    for name, value in message.headers.items():
        if not 0 < _size(name) <= MAX_ATTRIBUTE_NAME_BYTES or name.startswith(_RESERVED_PREFIX):
            return _refused(
                f"attribute {name[:64]!r} must have a name of 1 to {MAX_ATTRIBUTE_NAME_BYTES} bytes that does not "
                f"begin with {_RESERVED_PREFIX}",
                "InvalidHeaders",
            )
        if _size(value) > MAX_ATTRIBUTE_VALUE_BYTES:
            return _refused(f"attribute {name} has more than {MAX_ATTRIBUTE_VALUE_BYTES} bytes", "InvalidHeaders")
    size = request_bytes(message) + _REQUEST_OVERHEAD
    if size > MAX_REQUEST_BYTES:
        return _refused(f"it has {size} bytes, more than {MAX_REQUEST_BYTES}", "TooLarge")
    return None


def request_bytes(message: Message) -> int:
    """Return an upper bound of the bytes that a message adds to a request."""
    size = _MESSAGE_OVERHEAD + len(message.value or b"") + _size(message.key or "")
    for name, value in message.headers.items():
        size += _ATTRIBUTE_OVERHEAD + _size(name) + _size(value)
    return size


def requests(batch: Sequence[Message], indexes: Sequence[int]) -> Iterator[list[int]]:
    """Split messages of one key into requests within the limits, in order."""
    request: list[int] = []
    size = _REQUEST_OVERHEAD
    for index in indexes:
        adds = request_bytes(batch[index])
        if request and (len(request) == MAX_REQUEST_MESSAGES or size + adds > GOOD_REQUEST_BYTES):
            yield request
            request, size = [], _REQUEST_OVERHEAD
        request.append(index)
        size += adds
    if request:
        yield request


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _refused(why: str, reason: str) -> EventRefused:
    return EventRefused(f"Pub/Sub does not take this message: {why}", reason=reason, retryable=False)
