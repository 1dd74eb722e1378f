"""Whatever an event, a server or a broker says, it must not steer the terminal on which a person reads it."""

from __future__ import annotations


def safe(text: str, *, lines: bool = False) -> str:
    """The text with every character spelled out that could steer a terminal: escape sequences, but also those that turn
    the direction of text around. ``lines`` keeps line ends and tabs."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
