"""Log lines: a sentence and its fields, as JSON for machines and in colours for people, without secrets in either.

``log.info("took over a partition", extra={"partition": 3})``. What stands in ``extra`` becomes a field. Passwords in
URLs and in ``password=...`` are blotted out in sentences, fields and tracebacks alike, at the last moment before a line
is written, so that no caller can forget it. Lines go to standard error: standard output belongs to the log sink.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TextIO

BLOT: Final = "***"


class LogFormat(StrEnum):
    """What a line looks like."""

    AUTO = "auto"
    """Readable on a terminal, JSON elsewhere."""
    JSON = "json"
    TEXT = "text"


# Each keeps its first group. They rather blot out too much: `\S*` reaches for the last @ of a word, because a
# password that should have been percent-encoded may hold one itself.
_SECRETS: Final = (
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)\S*(?=@)", re.IGNORECASE),
    re.compile(r"(pass(?:word|wd|phrase)?\s*=\s*)(?:'[^']*'|\"[^\"]*\"|[^\s&;,'\"]+)", re.IGNORECASE),
    re.compile(r"([\"']\S*(?:password|passphrase|secret|token)[\"']\s*:\s*)(?:\"[^\"]*\"|'[^']*')", re.IGNORECASE),
    re.compile(r"(\bbearer\s+)[\w.~+/-]{16,}=*", re.IGNORECASE),
)

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS: Final = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


def redact(text: str) -> str:
    """The text without what looks like a secret."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<1>{BLOT}", text)
    return text


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(str(key)): _redacted(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redact(str(value))


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as ``extra``, without secrets."""
    return {
        name: _redacted(value)
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")
    }


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in line}
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class ReadableLines(logging.Formatter):
    """Time, level, sentence, fields; in colours where that is wanted."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={_short(value)}" for name, value in fields_of(record).items())
        level = self._painted(f"{record.levelname.lower():<8}", _COLOURS.get(record.levelname, "0"))
        line = f"{self._painted(time, '2')} {level} {_harmless(redact(record.getMessage()))}"
        if fields:
            line += f"  {self._painted(fields, '2')}"
        if record.exc_info:
            line += "\n" + redact(self.formatException(record.exc_info))
        return line

    def _painted(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours else text


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = _harmless(text)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _harmless(text: str) -> str:
    """Whatever a server or an event put into a message, it must not steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


class _Lines(logging.StreamHandler[TextIO]):
    """The handler that ``configure`` puts in place, known by its class when it is replaced."""


def configure(level: str, format: LogFormat = LogFormat.AUTO, stream: TextIO | None = None) -> None:
    """Set up logging for the whole process. May be called again; the last call counts."""
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    readable = format is LogFormat.TEXT or (format is LogFormat.AUTO and is_terminal)
    handler = _Lines(stream)
    handler.setFormatter(ReadableLines(colours=is_terminal) if readable else JsonLines())
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Lines)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries speak up only when something is wrong
    logging.getLogger("mailboat").setLevel(level.upper())
