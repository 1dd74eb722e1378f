"""Statements of the pull engine and of the inbox: text for each driver, parameters, and rows as events."""

import json
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from mailboat.consumer.handler_outcomes import Refusal
from mailboat.consumer.received_event import Event

_COLUMNS: Final = (
    "event_id, event_type, key, payload, content_type, headers::text, tags, aggregate_type, aggregate_id,"
    " traceparent, created_at, attempt, redeliveries, replay, position, partition, group_label"
)
PULL: Final = f"select {_COLUMNS} from mailboat.pull(cast(:p1 as text), cast(:p2 as integer), cast(:p3 as text))"
REFUSE: Final = (
    "select mailboat.refuse(cast(:p1 as text), cast(:p2 as uuid), cast(:p3 as text), cast(:p4 as text),"
    " cast(:p5 as boolean), make_interval(secs => cast(:p6 as double precision)), cast(:p7 as boolean),"
    " cast(:p8 as text))"
)

ONCE: Final = "select mailboat.once(cast(:p1 as text), cast(:p2 as uuid))"


class PullArguments:
    """Arguments of a pull: subscription, maximum events, outbox (None: the only one with this subscription)."""

    def __init__(self, subscription: str, size: int | None, outbox: str | None) -> None:
        self.pull = (subscription, size, outbox)
        self._subscription = subscription
        self._outbox = outbox

    def refusal(self, event_id: UUID, refusal: Refusal) -> tuple[Any, ...]:
        delay = None if refusal.retry_in is None else refusal.retry_in.total_seconds()
        return (
            self._subscription,
            str(event_id),
            refusal.error,
            refusal.reason,
            refusal.final,
            delay,
            refusal.counted,
            self._outbox,
        )


def event_of(row: Sequence[Any]) -> Event:
    """Return a row of ``PULL`` as an event."""
    return Event(
        id=row[0] if isinstance(row[0], UUID) else UUID(row[0]),  # not every driver returns a UUID
        type=row[1],
        key=row[2],
        payload=None if row[3] is None else bytes(row[3]),
        content_type=row[4],
        headers=json.loads(row[5]) if row[5] else {},
        tags=tuple(row[6]),
        aggregate_type=row[7],
        aggregate_id=row[8],
        traceparent=row[9],
        created_at=row[10],
        attempt=row[11],
        redeliveries=row[12],
        replay=row[13],
        position=row[14],
        partition=row[15],
        group=row[16],
    )


def _psycopg_style(statement: str) -> bytes:
    for number in range(9, 0, -1):
        statement = statement.replace(f":p{number}", "%s")
    return statement.encode()


PSYCOPG_PULL: Final = _psycopg_style(PULL)
PSYCOPG_REFUSE: Final = _psycopg_style(REFUSE)
PSYCOPG_ONCE: Final = _psycopg_style(ONCE)
