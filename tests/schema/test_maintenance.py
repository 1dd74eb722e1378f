"""Reports of maintenance that cannot be done (G10): the time that writers have left, and the cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import sql

from mailboat.runtime.maintenance import Maintenance, RetentionClock
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from mailboat_spec import Pooler, Retention
from support.wait import await_until

OUTBOX = "mailboat.outbox"


@asynccontextmanager
async def at_work(database: Database, clock: RetentionClock | None = None) -> AsyncIterator[Maintenance]:
    maintenance = Maintenance(
        lambda: database.url, TableLayout(OUTBOX), Retention(), Pooler.AUTO, clock or RetentionClock()
    )
    rounds = asyncio.create_task(maintenance.run())
    try:
        yield maintenance
    finally:
        rounds.cancel()
        with suppress(asyncio.CancelledError):
            await rounds


async def test_the_days_left_are_reported_if_no_time_partition_can_be_created(outbox: Database) -> None:
    with psycopg.connect(outbox.url, autocommit=True) as owner:
        later = owner.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = 'mailboat.outbox'::regclass"
            " order by 1 offset 4"
        ).fetchall()
        for (name,) in later:  # the detached tables block the creation of new time partitions
            owner.execute(f"alter table mailboat.outbox detach partition {name}")
    async with at_work(outbox) as maintenance:
        await await_until(lambda: maintenance.error is not None, timeout=20, what="the upkeep to fail")
        assert maintenance.days_ahead is not None
        assert 1 < maintenance.days_ahead <= 3
        assert "is in the way" in (maintenance.error or "")


async def test_successful_maintenance_reports_nothing(outbox: Database) -> None:
    async with at_work(outbox) as maintenance:
        await await_until(lambda: (maintenance.days_ahead or 0) > 29, timeout=20, what="a round")
        assert maintenance.error is None


async def test_a_server_whose_clock_jumped_ahead_drops_no_day_of_the_present(outbox: Database) -> None:
    """The server's clock is 40 days ahead of the relay's. The server's day 35 days ago is in the relay's future."""
    jump = timedelta(days=40)
    days = "select (now() - '35 days'::interval)::date, (now() - '80 days'::interval)::date"
    ((to_come, long_over),) = outbox.execute(days)
    for day in (to_come, long_over):
        outbox.execute(
            sql.SQL("create table {} partition of mailboat.outbox for values from ({}) to ({})").format(
                sql.Identifier("mailboat", f"outbox_p{day:%Y%m%d}"),
                *(sql.Literal(f"{each} 00:00+00") for each in (day, day + timedelta(days=1))),
            )
        )
    async with at_work(outbox, RetentionClock(wall=lambda: datetime.now(UTC) - jump)) as maintenance:
        await await_until(lambda: maintenance.blocked is not None, timeout=20, what="a round")
        assert "retention goes by the earlier time" in (maintenance.blocked or "")
    left = [name for (name,) in outbox.execute("select relname from pg_class where relname ~ '_p[0-9]{8}$'")]
    assert f"outbox_p{to_come:%Y%m%d}" in left
    assert f"outbox_p{long_over:%Y%m%d}" not in left


@pytest.mark.parametrize(
    ("server", "own", "believed"),
    [(1, 1, 1), (900, 1, 1), (1, 900, 1), (900, 900, 1), (-5, 1, -5)],
    ids=["both right", "server jumps", "relay jumps", "both jump", "set back"],
)
def test_no_clock_that_jumps_moves_the_time_of_retention_forward(server: int, own: int, believed: int) -> None:
    """Times in hours since the first call, one hour after it."""
    start, hours, passed = datetime(2030, 1, 1, tzinfo=UTC), [0], [0.0]
    clock = RetentionClock(lambda: start + timedelta(hours=hours[0]), lambda: passed[0])
    assert clock.now(start) == start
    hours[0], passed[0] = own, 3600.0
    assert clock.now(start + timedelta(hours=server)) == start + timedelta(hours=believed)
