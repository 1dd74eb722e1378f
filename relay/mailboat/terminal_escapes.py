"""Escaping of text from events, servers and brokers, so that it can't control the terminal."""


def safe(text: str, *, lines: bool = False) -> str:
    """Escape every character that could control a terminal: escape sequences, but also changes of text direction.
    ``lines`` keeps line ends and tabs."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
