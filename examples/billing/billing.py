"""Billing: a consumer of orders from Kafka, with claims in Redis against repeated charges.

`mailboat consume -f billing.yaml billing:billing` runs it. See docs/consumers-kafka.md.
"""

from decimal import Decimal

from pydantic import BaseModel

from mailboat import Consumer, Event, Refuse


class OrderPlaced(BaseModel):
    order: str
    total: Decimal


billing = Consumer("billing")  # configured by billing.yaml


@billing.on("order.placed")
async def invoice(order: OrderPlaced, event: Event) -> None:
    if order.total < 0:
        raise Refuse("negative total")  # becomes a dead letter at once
    # A real consumer calls a bank here. The event's id is the idempotency key, so a repetition after a crash is
    # harmless.
    print(f"charged {order.total} for {order.order}, idempotency key {event.id}", flush=True)
