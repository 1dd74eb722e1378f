"""Cost of the lag query: no temporary files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from mailboat.store.queries import Since, predicate
from mailboat.store.sql import statements
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from mailboat_spec import Filter
from support.databases import migrated_database
from support.renamed_table import RENAMED, make_renamed

EVENTS = 20_000


@pytest.fixture(scope="module", params=["postgres", "postgres14"])
def behind(request: pytest.FixtureRequest) -> Iterator[Database]:
    """Two outboxes on both Postgres versions, each with a subscription that has settled no event."""
    for database in migrated_database(request.getfixturevalue(request.param)):
        make_renamed(database)
        with psycopg.connect(database.url) as connection:
            for number, (table, event_type) in enumerate(
                [("mailboat.outbox", "event_type"), ("shop.events", "type")], start=1
            ):
                connection.execute(
                    f"insert into {table} ({event_type}, payload) select 'order.placed',"
                    f" decode(repeat(md5(i::text), 20), 'hex') from generate_series(1, {EVENTS}) as i"
                )
                connection.execute(
                    "insert into mailboat.subscriptions (id, outbox, name, partitions) overriding system value"
                    " values (%s, %s, 'shop/slow', 8)",
                    [number, table],
                )
                connection.execute(
                    "insert into mailboat.cursors"
                    " (subscription_id, partition, settled_snapshot, system_identifier, timeline)"
                    " select %s, p, '3:3:', system_identifier, 1 from generate_series(0, 7) as p, pg_control_system()",
                    [number],
                )
        yield database


@pytest.mark.parametrize("wanted", [["*"], ["order.*"], ["refund.made"]], ids=str)
@pytest.mark.parametrize(("number", "layout"), [(1, TableLayout()), (2, RENAMED)], ids=["ours", "renamed"])
def test_a_probe_writes_no_temporary_files(
    behind: Database, number: int, layout: TableLayout, wanted: list[str]
) -> None:
    filter_ = predicate(Filter.model_validate({"eventTypes": wanted}), Since("2020-01-01T00:00:00Z", 1))
    statement = sql.SQL(statements("subscription_rows")["backlog"]).format(rows=layout.rows, wanted=filter_)
    where = {"subscription": number, "partitions": 8, "bound": EVENTS + 1, "epochs": []}
    with psycopg.connect(behind.url) as connection:
        connection.execute(statements("windows")["guard"])
        connection.execute("set local work_mem = '64kB'")
        found = connection.execute(statement, where).fetchall()
        explain = sql.SQL("explain (analyze, buffers, format json) ") + statement
        (plan,) = connection.execute(explain, where).fetchone() or (None,)
    assert sum(row[1] for row in found) == (0 if wanted == ["refund.made"] else EVENTS)
    assert _temporary(plan[0]["Plan"]) == 0, json.dumps(plan, indent=1)


def _temporary(node: dict[str, Any]) -> int:
    blocks = int(node.get("Temp Written Blocks", 0)) + int(node.get("Temp Read Blocks", 0))
    return blocks + sum(map(_temporary, node.get("Plans", ())))
