"""Logging of a relay process (``mailboat_spec.structured_logs``)."""

from __future__ import annotations

from typing import TextIO

from mailboat_spec import structured_logs
from mailboat_spec.structured_logs import JsonLines, LogFormat, ReadableLines

__all__ = ["JsonLines", "LogFormat", "ReadableLines", "configure"]


def configure(level: str, format: LogFormat = LogFormat.AUTO, stream: TextIO | None = None) -> None:
    """Configure logging of the whole process. A later call replaces the configuration."""
    structured_logs.configure("mailboat", level, format, stream)
