"""Encoding of configurations and assignments that the operator sends to relays.

Small content is plain text, so that the ConfigMap is readable. Large content is gzip: a ConfigMap holds 1 MiB, and the
JSON of a few thousand subscriptions is longer. Readers detect gzip by its magic bytes and stop decompression at their
limit: a few kilobytes of gzip can expand to gigabytes.
"""

import gzip
import zlib
from typing import Final

LARGEST_TEXT: Final = 4 * 1024 * 1024
"""Largest text in bytes that operator and relays accept: about eight thousand subscriptions."""
LARGEST_PLAIN: Final = 512 * 1024
"""Largest text in bytes that is sent uncompressed."""

_MAGIC: Final = b"\x1f\x8b"
_GZIP: Final = 16 + zlib.MAX_WBITS


class TooLarge(ValueError):
    """The text is larger than the reader's limit."""


def pack(text: str) -> bytes:
    """Encode a text deterministically."""
    content = text.encode()
    return content if len(content) <= LARGEST_PLAIN else gzip.compress(content, 6, mtime=0)


def is_packed(content: bytes) -> bool:
    return content.startswith(_MAGIC)


def unpack(content: bytes, most: int = LARGEST_TEXT) -> bytes:
    """Decode the output of ``pack``, or any plain text. Raise ``TooLarge``, or ``ValueError`` for corrupt gzip."""
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
