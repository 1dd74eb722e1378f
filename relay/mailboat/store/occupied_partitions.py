"""The time partitions that a poll reads.

Time partitions are made 30 days ahead (G10), and an index scan of an empty one costs as much as of one with rows. A
poll therefore leaves out the empty ones after the last that has rows. No clock decides which ones these are: the poll
checks in the same statement that the files of all partitions left out are still empty (``stray``). If one is not, the
poll is void and repeated with the current list. A poll that finds no events moves no snapshot, so it may leave the
check to a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from psycopg import sql

from mailboat.store.connection import Pipeline
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout

_SQL = statements("windows")


@dataclass(frozen=True, slots=True)
class OccupiedPartitions:
    """Time partitions up to the last one with rows; those that begin at ``before`` or later are empty."""

    outbox: int
    """Oid of the partitioned table."""
    before: str
    read: list[int]
    """Oids of the time partitions that a poll reads."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a statement that leaves out the empty partitions."""
        return {"outbox": self.outbox, "read": self.read}

    @classmethod
    def load(cls, pipeline: Pipeline, layout: TableLayout) -> Self | None:
        """Read the catalog. Return None if a poll has to read the whole table."""
        statement = sql.SQL(_SQL["time_partitions"]).format(outbox=layout.regclass)
        found = pipeline.send(statement, {"created_at": layout.columns.get("created_at", "created_at")})
        pipeline.wait()
        row = found.fetchone()
        return None if row is None else cls(*row)
