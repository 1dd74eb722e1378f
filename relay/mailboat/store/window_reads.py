"""Reads of open windows, in the thread of a connection (see ``ConnectionThread``).

Two megabytes of rows arrive in hundreds of small socket reads, and an event loop would wake up for each of them. The
thread reads the next chunk while the loop encodes and publishes the previous one.

After every wait for a result, the thread waits some milliseconds more for the GIL. With one wait per statement, this
cost more than the read itself. A chunk therefore has two waits: one for its upper bound, one for its events.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from psycopg import Cursor

from mailboat.store.connection import Pipeline, Row
from mailboat.store.outbox_store import Chunk, CursorGroup, CursorKey, Lease, Window
from mailboat.store.queries import ChunkKind, ComposedQueries, QueryCache
from mailboat.store.settings import ReadLimits
from mailboat.store.sql import statements

_SQL = statements("windows")


class WindowReads:
    """Reader of windows for all members that share a window: its bounds, then one chunk at a time."""

    def __init__(self, query_cache: QueryCache, limits: ReadLimits) -> None:
        self._query_cache = query_cache
        self._limits = limits
        self._rows_ahead = sys.maxsize
        """Number of rows to measure for the next chunk. If rows are large, twice the rows of the previous chunk: rows
        measured beyond the end of a chunk are measured again for the next one."""

    def measure(self, pipeline: Pipeline, group: CursorGroup) -> Callable[[], Window | None]:
        bounds = {"limit": self._limits.small_rows + 1, "max_bytes": self._limits.bytes}
        where = {"pooled": pipeline.server.pooled, "settled_snapshot": group.settled_snapshot, **bounds}
        for lease in group.members:  # one lease reads for all; if it was lost, the next one
            spans = pipeline.send(self._query_cache.span, {"epoch": lease.epoch, **where})
            pipeline.wait()
            window_snapshot, lowest, highest = spans.fetchone() or (None, None, None)
            if highest is not None:
                window = Window(group.settled_snapshot, window_snapshot, lowest, highest)
                return lambda: window
        return lambda: None

    def read(
        self, pipeline: Pipeline, window: Window, members: Sequence[Lease], after: int, *, crash_count: int
    ) -> Callable[[], Chunk]:
        """Return the next chunk. If all leases were lost, return an empty one: the next settlement reports the loss."""
        limits = self._limits.after(crash_count)
        composed = self._query_cache.for_members(members)
        keys = frozenset(lease.key for lease in members)

        def chunk(rows: Sequence[Row], reached: int, *, last: bool) -> Chunk:
            return Chunk(composed.fan_out(rows, keys), reached, last)

        where: dict[str, Any] = {
            "window_snapshot": window.window_snapshot,
            "after": after,
            "limit": limits.rows,
            "max_bytes": limits.bytes,
            **composed.own(members),
        }
        walk_from = (window.lowest or 1) - 1
        if window.highest is None:
            query = composed.small_window
        elif after < walk_from:
            query = composed.late
        else:
            query = composed.chunk_end
            where["limit"] = min(limits.rows, self._rows_ahead)
        reader, found = _query(pipeline, query, members, where)
        if reader is None:
            return lambda: chunk((), after, last=True)
        if query is not composed.chunk_end:

            def bounded() -> Chunk:
                """Build a chunk from a statement whose last column is the total number of events."""
                rows = found.fetchall()
                events = [row[: composed.width] for row in rows]
                complete = not rows or len(rows) == rows[0][-1]
                if complete and query is composed.late:
                    return chunk(events, walk_from, last=False)
                return chunk(events, events[-1][0] if events else after, last=complete)

            return bounded
        where["epoch"] = reader.epoch
        reach, size, last = self._reach(pipeline, composed, found, where)
        if reach is None:
            return lambda: chunk((), after, last=True)
        statement = composed.large_window[ChunkKind(bool(window.carry_over), size > limits.row_bytes)]
        found = pipeline.send(statement, {**where, "reach": reach, "bytes": str(size)})
        return lambda: chunk(found.fetchall(), reach, last=last)

    def _reach(
        self, pipeline: Pipeline, composed: ComposedQueries, found: Cursor[Row], where: dict[str, Any]
    ) -> tuple[int | None, int, bool]:
        """Return the id up to which the next chunk reaches (None if no rows are left), its size in bytes, and whether
        the window ends there."""
        reach, rows, size = found.fetchone() or (None, 0, 0)
        last = rows < where["limit"]
        if size > where["max_bytes"]:
            found = pipeline.send(composed.chunk_end_within, where)
            pipeline.wait()
            within, rows, size = found.fetchone() or (reach, rows, size)
            reach, last = within, last and within == reach
            self._rows_ahead = 2 * rows
        else:
            self._rows_ahead = min(2 * self._rows_ahead, sys.maxsize)
        return reach, size, last


def _query(
    pipeline: Pipeline, query: bytes, members: Sequence[Lease], where: dict[str, object]
) -> tuple[Lease | None, Cursor[Row]]:
    """Send ``query`` with the lease of one member; return that lease (None if all were lost) and the result."""
    held_rows = pipeline.send(_SQL["still_open"], {"epochs": [lease.epoch for lease in members], **where})
    answer = pipeline.send(query, {"epoch": members[0].epoch, **where})
    pipeline.wait()
    held = {CursorKey(*row) for row in held_rows.fetchall()}
    reader = next((lease for lease in members if lease.key in held), None)
    if reader is not None and reader is not members[0]:  # first lease lost: an empty result means nothing
        answer = pipeline.send(query, {"epoch": reader.epoch, **where})
        pipeline.wait()
    return reader, answer
