"""The consumer of the playground: prints each event, and refuses every tenth version of an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mailboat import Consumer, Event, Refuse

_REFUSED: Final = 10

view = Consumer("playground/orders-view")


@dataclass
class Order:
    """Payload of the events."""

    order: str
    version: int


@view.on("order.*")
async def show(order: Order, event: Event) -> None:
    """Print the event."""
    if order.version % _REFUSED == 0:
        raise Refuse(f"version {order.version} of {order.order} is refused, so that there are dead letters to look at")
    print(f"{event.type} {order.order} version {order.version}", flush=True)
