"""Loader of the SQL statements in ``mailboat/store/sql/*.sql``. Python code holds only session settings and fragments.

``-- name: <name>`` begins a statement. ``{braces}`` are filled by `psycopg.sql`; ``%(names)s`` are parameters. Lines of
comment are not sent: psycopg parses a statement of more than 4,096 bytes again for every execution.
"""

import re
from functools import cache
from importlib import resources
from typing import LiteralString

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)


@cache
def statements(file: str) -> dict[str, LiteralString]:
    """Return the statements of ``mailboat/store/sql/<file>.sql`` by name."""
    return {name: _COMMENT.sub("", body).strip() for name, body in _bodies(file).items()}


def comments(file: str) -> dict[str, str]:
    """Return the lines of comment of each statement."""
    return {name: "".join(_COMMENT.findall(body)) for name, body in _bodies(file).items()}


def _bodies(file: str) -> dict[str, LiteralString]:
    text = (resources.files(__name__) / f"{file}.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))
