"""Formatting for terminals: columns, ages, payloads. Content of events must never control the terminal."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')
_BINARY_SHOWN: Final = 256


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


def shortened(text: str, width: int) -> str:
    """Return one safe line of at most ``width`` characters."""
    line = safe(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 3] + "..."


def key_cell(key: str | None) -> str:
    return "-" if key is None else shortened(key, 40)


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], gap: int = 3) -> list[str]:
    """Return aligned lines in the style of kubectl."""
    table = [list(header), *([safe(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(header))]
    return [(" " * gap).join(map(str.ljust, row, widths)).rstrip() for row in table]


def moment(time: datetime | None) -> str:
    """Format a time in UTC, to the second."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if time is not None else "-"


def field_lines(fields: Mapping[str, object]) -> list[str]:
    """Return one aligned line per field, safe for a terminal."""
    width = max(map(len, fields))
    return [f"{name.replace('_', ' '):<{width}}  {_field(value)}" for name, value in fields.items()]


def _field(value: object) -> str:
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return safe(", ".join(map(str, value)))
    if isinstance(value, dict):
        return safe(json.dumps(value, ensure_ascii=False))
    return moment(value) if isinstance(value, datetime) else safe(str(value))


def json_row(row: Any) -> str:
    """Return a named tuple as one line of JSON, for programs."""
    return json.dumps(row._asdict(), default=moment, ensure_ascii=False)


def age(seconds: float | None) -> str:
    """Format a duration with at most two units: 4s, 3m12s, 2h5m, 3d4h."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    for unit, size, smaller, step in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // step
            return f"{whole // size}{unit}{f'{rest}{smaller}' if rest else ''}"
    return f"{whole}s"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 event``, ``3 events``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def named(type: str, key: str | None) -> str:
    return f"{shortened(type, 60)}{f' key {shortened(key, 40)}' if key is not None else ''}"


def describe(fields: Mapping[str, Any], *texts: tuple[str, str]) -> str:
    """Format all fields of an event, one per line, then ``texts`` and the payload, each below its name."""
    lines = field_lines({name: value for name, value in fields.items() if name != "payload"})
    payload = payload_text(fields["payload"], fields["content_type"])
    return "\n".join([*lines, *(part for text in (*texts, ("payload", payload)) for part in text)])


def payload_text(payload: bytes | None, content_type: str) -> str:
    """Format a payload: indented JSON, other text unchanged, bytes in hex. Always safe for a terminal."""
    if payload is None:
        return "(none: a tombstone)"
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        more = f" ... ({len(payload)} bytes)" if len(payload) > _BINARY_SHOWN else ""
        return f"(not text) {payload[:_BINARY_SHOWN].hex(' ')}{more}"
    if "json" in content_type.lower():
        with suppress(ValueError, RecursionError):
            json.loads(text)
            text = reindented(text)
    return safe(text, lines=True)


def json_line(text: str) -> str:
    """Return valid JSON in one line, safe for a terminal. Numbers keep their exact spelling."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char in "\n\r\t" else json.dumps(char)[1:-1] for char in text)


def reindented(text: str) -> str:
    """Return valid JSON with line breaks and indentation. Numbers and strings keep their exact spelling."""
    out: list[str] = []
    depth, before = 0, ""
    for token in _TOKENS.findall(text):
        closes = token in "}]"
        depth -= closes
        if closes != (before in ("{", "[", ",")):  # an empty object or list stays on its line
            out.append("\n" + "  " * depth)
        out.append(": " if token == ":" else token)
        depth += token in "{["
        before = token
    return "".join(out)
