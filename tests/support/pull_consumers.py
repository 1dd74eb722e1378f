"""Pull subscriptions for tests: declared as by `mailboat migrate -f`, and pulled with plain SQL."""

from __future__ import annotations

import asyncio
from typing import Any, LiteralString

import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from mailboat.store.subscription_rows import declare_pulled
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from mailboat_spec import EventSubscription
from support.databases import connected
from support.manifests import event_subscription

NAME = "shop/view"
SOON = {"initial": "1ms", "max": "1ms", "jitter": 0.0}


def subscription(name: str = "view", namespace: str = "shop", **spec: Any) -> EventSubscription:
    """Return an EventSubscription shop/view with ``sink: {pull: {}}``, one partition and no waits."""
    delivery = {"backoff": SOON, **spec.pop("delivery", {})}
    spec = {"partitions": 1, "delivery": delivery, **spec}
    return EventSubscription.model_validate(
        event_subscription(name, spec.pop("sink", {"pull": {}}), namespace=namespace, **spec)
    )


def declare(database: Database, layout: TableLayout | None = None, **spec: Any) -> None:
    async def run() -> None:
        async with connected(database.url, "test") as link:
            await declare_pulled(link, layout or TableLayout(), [subscription(**spec)])

    asyncio.run(run())


class Puller:
    """One consumer: a connection, its open transaction, and the SQL statements of consumers in any language."""

    def __init__(self, url: str, isolation: psycopg.IsolationLevel | None = None, name: str = NAME) -> None:
        self.name = name
        self.connection = psycopg.connect(url, row_factory=namedtuple_row, prepare_threshold=None)
        self.connection.isolation_level = isolation

    def pull(self, most: int | None = None) -> list[Any]:
        return self.run("select * from mailboat.pull(%s, %s)", self.name, most)

    def ids(self, most: int | None = None) -> list[str]:
        """Pull and return the payloads as text."""
        return [bytes(row.payload).decode() for row in self.pull(most)]

    def take(self, most: int | None = None) -> list[str]:
        """Pull and commit."""
        found = self.ids(most)
        self.connection.commit()
        return found

    def take_all(self, most: int | None = None) -> list[str]:
        """Pull and commit until no events are left."""
        found: list[str] = []
        while batch := self.take(most):
            found += batch
        return found

    def refuse(self, event: Any, error: str = "no", **options: Any) -> str:
        """Roll back, and refuse the event in another transaction."""
        self.connection.rollback()
        named = "".join(f", {option} => %s" for option in options)
        statement: Any = f"select mailboat.refuse(%s, %s, %s{named})"
        ((outcome,),) = self.run(statement, self.name, event.event_id, error, *options.values())
        self.connection.commit()
        return str(outcome)

    def run(self, statement: LiteralString, *values: Any) -> list[Any]:
        return self.connection.execute(statement, values).fetchall()

    def vanish(self) -> None:
        """Close the connection within its transaction, as the kernel does for a killed consumer."""
        self.connection.pgconn.finish()

    def close(self) -> None:
        self.connection.close()


def emit(database: Database, *payloads: str, key: str | None = None, **event: Any) -> None:
    """Commit an event per payload. The default key is the part of the payload before its dash."""
    with psycopg.connect(database.url) as connection:
        for payload in payloads:
            connection.execute(
                "insert into mailboat.outbox (event_type, payload, key, headers, tags) values (%s, %s, %s, %s, %s)",
                (
                    event.get("type", "x"),
                    payload.encode(),
                    key or payload.partition("-")[0],
                    Jsonb(event["headers"]) if "headers" in event else None,
                    event.get("tags", []),
                ),
            )
