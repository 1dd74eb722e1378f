"""The consumer of compose.yaml: prints each event once, and refuses every tenth order."""

from dataclasses import dataclass

from mailboat import Consumer, Refuse

view = Consumer("shop/orders-view")


@dataclass
class Order:
    order: int


@view.on("order.placed")
async def show(order: Order) -> None:
    if order.order % 10 == 0:
        raise Refuse("every tenth order is refused, so that there are dead letters to look at")
    print(f"order {order.order}", flush=True)
