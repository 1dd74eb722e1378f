"""Orders: a FastAPI service that stores orders and emits an event for each one in the same transaction.

`uvicorn orders:app` runs it. `mailboat run -f orders.yaml` delivers the events to Kafka, and billing.py charges them.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from uuid import uuid4

import psycopg
from fastapi import FastAPI
from pydantic import BaseModel

from mailboat import emit

DATABASE_URL = os.environ["DATABASE_URL"]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with await psycopg.AsyncConnection.connect(DATABASE_URL) as connection:
        await connection.execute("create table if not exists orders (id text primary key, total numeric not null)")
    yield


app = FastAPI(lifespan=lifespan)


class NewOrder(BaseModel):
    total: Decimal


@app.post("/orders", status_code=201)
async def place(order: NewOrder) -> dict[str, str]:
    number = f"o-{uuid4().hex[:8]}"
    async with await psycopg.AsyncConnection.connect(DATABASE_URL) as connection:  # in production, from a pool
        await connection.execute("insert into orders (id, total) values (%s, %s)", [number, order.total])
        event_id = await emit(connection, "order.placed", {"order": number, "total": order.total}, key=number)
    return {"order": number, "event": str(event_id)}  # the order and its event are committed together
