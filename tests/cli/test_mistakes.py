"""Mistakes of a newcomer: docs/laptop-messages.md shows the exact output of each one, and no mistake is silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import sql

from support.newcomer import Mistake, mistakes, run_mistake

MISTAKES = mistakes()
SILENT = ("ok", "$ ", "shop/orders: applied", "shop/orders: outbox")


def test_the_page_has_them_all() -> None:
    assert len(MISTAKES) >= 37
    assert len({mistake.title for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_a_mistake_is_reported_as_the_page_shows(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    database = request.getfixturevalue("database") if mistake.needs_database else None
    try:
        printed = run_mistake(mistake, tmp_path, database)
    finally:
        if database is not None:
            for (role,) in database.execute(
                sql.SQL("select rolname from pg_roles where rolname like {}").format(sql.Literal(f"%_{database.name}"))
            ):
                database.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
    assert printed == mistake.shown
    assert "hunter2" not in "".join(line for line in printed.splitlines() if not line.startswith("$ "))
    told = [line for line in printed.splitlines() if not line.startswith(SILENT) and not line.endswith(": ok")]
    assert told, "a mistake without a word"
