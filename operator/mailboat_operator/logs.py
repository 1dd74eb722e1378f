"""Log lines of the operator: a sentence and its fields, as JSON for machines or as text for people.

``log.info("Leading.", extra={"lease": "mailboat-operator"})``. Entries of ``extra`` become fields. Bearer tokens and
private keys are redacted just before a line is written, so that no caller can forget it: an error of a client library
may contain the whole request. The relay has a similar module; neither may import the other.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from mailboat_operator.settings import LogFormat
from mailboat_spec.secrecy import redact

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _redacted(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {redact(str(key)): _redacted(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(each) for each in value]
    return redact(str(value))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given = ((name, value) for name, value in vars(record).items() if name not in _STANDARD)
    return {name: _redacted(value) for name, value in given if not name.startswith("_")}


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        line |= {name: value for name, value in _fields(record).items() if name not in line}
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class ReadableLines(logging.Formatter):
    """Time, level, sentence, fields."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        line = f"{time} {record.levelname.lower():<8} {redact(record.getMessage())}"
        for name, value in _fields(record).items():
            line += f" {name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        # Escape control characters: text from a server must not control the terminal.
        line = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", line)
        return line + "\n" + redact(self.formatException(record.exc_info)) if record.exc_info else line


class _Lines(logging.StreamHandler[TextIO]):
    """Handler installed by ``configure``, identified by its class when it is replaced."""


def configure(level: str, format: LogFormat = LogFormat.AUTO, stream: TextIO | None = None) -> None:
    """Set up logging for the whole process. May be called again; the last call counts."""
    stream = stream or sys.stderr
    readable = format is LogFormat.TEXT or (format is LogFormat.AUTO and stream.isatty())
    handler = _Lines(stream)
    handler.setFormatter(ReadableLines() if readable else JsonLines())
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Lines)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries log warnings and errors only
    logging.getLogger("mailboat_operator").setLevel(level.upper())
