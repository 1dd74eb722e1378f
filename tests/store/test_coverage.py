"""Filter coverage: events without a matching filter, and filters without a matching event.

The report contains only certain findings.
"""

from __future__ import annotations

import asyncio
import logging

import pytest
from psycopg import sql

from mailboat.runtime.maintenance import Maintenance
from mailboat.store.examination import Coverage, coverage
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from mailboat_spec import EventSubscription, Pooler, Retention
from support.cli import make_known
from support.databases import connected
from support.manifests import event_subscription
from support.wait import await_until

ORDERS = event_subscription("orders", filter={"eventTypes": ["order.*"]}, partitions=1)
RARE = event_subscription("rare", filter={"eventTypes": ["order.lost"], "tags": {"anyOf": ["100%"]}}, partitions=1)


async def examined(outbox: Database, *manifests: dict[str, object]) -> Coverage:
    async with connected(outbox.url, "test") as link:
        return await coverage(link, TableLayout(), [EventSubscription.model_validate(each) for each in manifests])


def emit(outbox: Database, *types: str) -> None:
    for kind in types:
        outbox.execute(sql.SQL("select mailboat.emit({}, '{{}}'::jsonb, key => 'k')").format(sql.Literal(kind)))


async def test_events_that_no_subscription_matches_are_counted_by_type(outbox: Database) -> None:
    emit(outbox, "order.placed", "orders.placed", "invoice.sent", "orders.placed")
    found = await examined(outbox, ORDERS, RARE)
    assert found.unmatched == {"orders.placed": 2, "invoice.sent": 1}
    (remark,) = found.remarks()
    assert "by type: orders.placed (2), invoice.sent (1). They are not delivered." in remark


async def test_unmatched_events_are_not_reported_while_another_relay_may_match_them(outbox: Database) -> None:
    emit(outbox, "invoice.sent")
    await make_known(outbox, event_subscription("of-another-relay"))
    assert (await examined(outbox, ORDERS)).unmatched == {}


async def test_a_subscription_that_skipped_all_events_of_a_day_is_idle(outbox: Database) -> None:
    await make_known(outbox, ORDERS, RARE)
    emit(outbox, "order.placed")
    assert (await examined(outbox, ORDERS, RARE)).idle == (), "they have not passed the event yet"
    outbox.execute("update mailboat.cursors set settled_snapshot = pg_current_snapshot()")
    outbox.execute(
        "update mailboat.cursors set highest_settled_id = (select max(id) from mailboat.outbox) where subscription_id ="
        " (select id from mailboat.subscriptions where name = 'shop/orders')"
    )
    found = await examined(outbox, ORDERS, RARE)
    assert found.idle == ("shop/rare",)
    assert found.remarks()[0].startswith("shop/rare: its filter matched no event of the last 24 hours")
    outbox.execute("update mailboat.subscriptions set state = 'Paused'")
    assert (await examined(outbox, ORDERS, RARE)).idle == ()


async def test_a_relay_logs_each_finding_once(outbox: Database, caplog: pytest.LogCaptureFixture) -> None:
    resources = [EventSubscription.model_validate(ORDERS)]
    maintenance = Maintenance(lambda: outbox.url, TableLayout(), Retention(), Pooler.AUTO)
    task = asyncio.create_task(maintenance.examine(lambda: resources, every=0.01))
    try:
        with caplog.at_level(logging.WARNING, "mailboat.runtime.maintenance"):
            emit(outbox, "invoice.sent")
            await await_until(lambda: maintenance.coverage.unmatched == {"invoice.sent": 1}, what="the first event")
            emit(outbox, "invoice.sent")
            await await_until(lambda: maintenance.coverage.unmatched == {"invoice.sent": 2}, what="the second event")
            emit(outbox, "invoice.paid")
            await await_until(lambda: len(maintenance.coverage.unmatched) == 2, what="another type")
            await await_until(lambda: len(caplog.records) >= 2, what="its line")
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert ["invoice.paid" in record.getMessage() for record in caplog.records] == [False, True]
