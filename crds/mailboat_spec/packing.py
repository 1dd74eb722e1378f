"""Configurations and assignments as bytes, on their way from the operator to relays.

A small one is plain text, so that a person can read the ConfigMap. A large one is gzip: a ConfigMap holds 1 MiB, and
the JSON of some thousand subscriptions is longer. Readers tell the two apart by gzip's first bytes and decompress no
more than they accept: a few kilobytes of gzip can hold gigabytes.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Final

LARGEST_TEXT: Final = 4 * 1024 * 1024
"""Bytes of text that operator and relays accept: some eight thousand subscriptions."""
LARGEST_PLAIN: Final = 512 * 1024
"""Bytes of text that are sent as they are."""

_MAGIC: Final = b"\x1f\x8b"
_GZIP: Final = 16 + zlib.MAX_WBITS


class TooLarge(ValueError):
    """The text is larger than anybody accepts."""


def pack(text: str) -> bytes:
    """Encode a text, the same one always to the same bytes."""
    content = text.encode()
    return content if len(content) <= LARGEST_PLAIN else gzip.compress(content, 6, mtime=0)


def is_packed(content: bytes) -> bool:
    return content.startswith(_MAGIC)


def unpack(content: bytes, most: int = LARGEST_TEXT) -> bytes:
    """Decode what ``pack`` made, or any plain text. Raises ``TooLarge``; ``ValueError`` for gzip that is broken."""
    if is_packed(content):
        decompressor = zlib.decompressobj(_GZIP)
        try:
            content = decompressor.decompress(content, most + 1)
        except zlib.error as error:
            raise ValueError("it is broken gzip") from error
        if len(content) <= most and not decompressor.eof:
            raise ValueError("it is gzip that ends too early")
    if len(content) > most:
        raise TooLarge(f"it has more than {most // 1024} KiB")
    return content
