"""Consumer process for tests that kill it.

    python -m support.consumer_main '{"url": ..., "die_at": "handled", "passage": 3}'

The handler inserts each event into the table ``effects``. The first attempt of every thirtieth event of a key fails.
The handler ends the process for events of type ``lethal``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import psycopg

from mailboat import Consumer, Event
from mailboat.consumer.pull_source import ConsumerPoint, Pace, Passing

EFFECTS = "create table effects (ordinal bigserial, event_id uuid, key text, number int, consumer int)"
NAME = "faults/view"


def dying_at(point: str | None, passage: int) -> Passing:
    left = passage

    def passing(passed: ConsumerPoint) -> None:
        nonlocal left
        if passed.value == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return passing


def consumer(orders: dict[str, Any]) -> Consumer:
    view = Consumer(
        NAME,
        url=orders["url"],
        spec=orders["spec"],
        concurrency=orders.get("concurrency", 2),
        pace=Pace(first=0.01, longest=0.1, longest_notified=0.1),
        passing=dying_at(orders.get("die_at"), orders.get("passage", 1)),
    )

    async def handle(event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        truth = event.json()
        await tx.execute(
            "insert into effects (event_id, key, number, consumer) values (%s, %s, %s, %s)",
            [event.id, truth["key"], truth["number"], os.getpid()],
        )
        if event.type == "lethal":
            os._exit(1)
        if event.attempt == 1 and truth["number"] % 30 == 7:
            raise RuntimeError("the first attempt fails")

    if orders["spec"].get("delivery", {}).get("groupBy"):

        @view.batch("*")
        async def handle_group(events: list[Event], tx: psycopg.AsyncConnection[Any]) -> None:
            for event in events:
                await handle(event, tx)
    else:
        view.on("*")(handle)
    return view


if __name__ == "__main__":
    consumer(json.loads(sys.argv[1])).run()
