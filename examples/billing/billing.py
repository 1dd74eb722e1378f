"""Billing: handles orders from Kafka, with Redis to recognise events that it handled before.

`mailboat consume -f billing.yaml billing:billing` runs it. See docs/consumers-kafka.md.
"""

from decimal import Decimal

from pydantic import BaseModel

from mailboat import Consumer, Event, Refuse


class OrderPlaced(BaseModel):
    order: str
    total: Decimal


billing = Consumer("billing")  # billing.yaml has its configuration


@billing.on("order.placed")
async def invoice(order: OrderPlaced, event: Event) -> None:
    if order.total < 0:
        raise Refuse("negative total")  # dead letter at once
    # In place of a call to a bank. With the event's id as its idempotency key, a repetition after a crash is harmless.
    print(f"charged {order.total} for {order.order}, idempotency key {event.id}", flush=True)
