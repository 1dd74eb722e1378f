"""An outbox with other names of table and columns, most of them those of Debezium."""

from __future__ import annotations

import psycopg
from psycopg import sql

from mailboat.store.table import TableLayout, renamed
from mailboat_devservers.postgres import Database
from mailboat_spec import Columns

COLUMNS = Columns(preset="debezium", key="sorted_by", created_at="written_at")
RENAMED = TableLayout("shop.events", renamed(COLUMNS))


def make_renamed(database: Database) -> None:
    """Create the table, beside ``mailboat.outbox``."""
    with psycopg.connect(database.url) as connection:
        connection.execute("select mailboat.create_outbox(%s)", [RENAMED.table])
        for ours, theirs in sorted(RENAMED.columns.items(), key=lambda names: names[1] in RENAMED.columns):
            connection.execute(
                sql.SQL("alter table {} rename column {} to {}").format(
                    RENAMED.outbox, sql.Identifier(ours), sql.Identifier(theirs)
                )
            )
