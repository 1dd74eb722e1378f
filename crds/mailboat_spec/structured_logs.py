"""Log lines of relay and operator: a message and fields, as JSON for machines or coloured text for people.

``log.info("Partition acquired", extra={"partition": 3})``. Entries of ``extra`` become fields. Passwords, bearer tokens
and private keys are redacted in messages, fields and tracebacks by the formatter, so that no caller can forget it.
Lines go to standard error: standard output belongs to the log sink.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TextIO

from mailboat_spec.redaction import forget_details, redact


class LogFormat(StrEnum):
    AUTO = "auto"
    """Text on a terminal, JSON elsewhere."""
    JSON = "json"
    TEXT = "text"


_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS: Final = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


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
    """Return the entries of ``extra``, redacted."""
    return {
        name: _redacted(value)
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")
    }


def _printable(text: str) -> str:
    """Escape characters that could control a terminal; keep line ends and tabs."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def _traceback(formatter: logging.Formatter, about: Any) -> str:
    forget_details(about[1])
    return redact(formatter.formatException(about))


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in line}
        if record.exc_info:
            line["traceback"] = _traceback(self, record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class ReadableLines(logging.Formatter):
    """Time, level, message and fields as text, optionally coloured."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={_short(value)}" for name, value in fields_of(record).items())
        level = self._painted(f"{record.levelname.lower():<8}", _COLOURS.get(record.levelname, "0"))
        line = f"{self._painted(time, '2')} {level} {_printable(redact(record.getMessage()))}"
        if fields:
            line += f"  {self._painted(fields, '2')}"
        if record.exc_info:
            line += "\n" + _traceback(self, record.exc_info)
        return line

    def _painted(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours else text


def _short(value: Any) -> str:
    text = _printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


class LineHandler(logging.StreamHandler[TextIO]):
    """Handler installed by ``configure``, which recognises it by its class in order to replace it."""


def configure(package: str, level: str, format: LogFormat = LogFormat.AUTO, stream: TextIO | None = None) -> None:
    """Configure logging of the whole process; ``level`` is that of one package. A later call replaces it."""
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    readable = format is LogFormat.TEXT or (format is LogFormat.AUTO and is_terminal)
    handler = LineHandler(stream)
    handler.setFormatter(ReadableLines(colours=is_terminal) if readable else JsonLines())
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, LineHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # of libraries, warnings and errors only
    logging.getLogger(package).setLevel(level.upper())
