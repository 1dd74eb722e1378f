"""Messages of a broker in the form that a source returns, and their dead letters."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from mailboat.cloudevents import MessageEncoder
from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.interfaces import DeadRecord, Original
from mailboat.consumer.handler_outcomes import Refusal
from mailboat.model import OutboxEvent as Row

AT = datetime(2026, 11, 16, 3, 44, tzinfo=UTC)
KAFKA = Original(topic="orders", partition=3, offset=4711, timestamp=AT, key=b"o-1", value=b"{}", headers=())
PUBSUB = replace(KAFKA, topic="orders-billing", partition=None, offset="8123")
TRACEBACK = 'Traceback (most recent call last):\n  File "billing.py", line 7, in invoice\nbank.Closed: no such account'
FAILED = Refusal("HandlerFailed", TRACEBACK)


def message_of(row: Row, format: str, place: Original) -> Original:
    """Return the message that a relay writes for an outbox row."""
    prefix = "ce_" if place.partition is not None else "ce-"
    written = MessageEncoder(format, source="mailboat/shop/orders", header_prefix=prefix).encode(
        row, sequence=9, partition=3, generation=2, attempt=2
    )
    value = written.value if place.partition is not None else written.value or b""
    headers = tuple((name, text.encode()) for name, text in written.headers.items())
    return replace(place, key=None if written.key is None else written.key.encode(), value=value, headers=headers)


def dead(original: Original, refusal: Refusal = FAILED) -> DeadRecord:
    """Return the dead letter of a message that was tried four times."""
    return DeadRecord(
        record=decode(original), refusal=refusal, attempts=4, first_failed=AT, failed_at=AT.replace(minute=45),
        consumer="shop/billing", group="shop.billing",
    )  # fmt: skip
