"""The second connection of a consumer process: notifications, heartbeats, lag, and creation of time partitions."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from mailboat.consumer.pull_source import WakeUp
from mailboat.consumer.transactions import error_message

log = logging.getLogger(__name__)

_BEAT_EVERY: Final = 10.0
_IDLE_FOR: Final = 30.0
_MAINTAIN_EVERY: Final = 3600.0


@dataclass(slots=True)
class ConsumerLag:
    """Lag from the last query."""

    pending: int = 0
    bounded: bool = False
    oldest: float | None = None
    parked: int = 0
    dead: int = 0


class Monitor:
    """Reconnects until cancelled. Without this connection the workers continue by polling."""

    def __init__(
        self,
        url: str,
        subscription: str,
        instance: str,
        wake: WakeUp,
        *,
        outbox: str | None = None,
        beat_every: float = _BEAT_EVERY,
    ) -> None:
        self._url = url
        self._parameters = {"subscription": subscription, "outbox": outbox, "instance": instance, "idle_for": _IDLE_FOR}
        self._instance = instance
        self._wake = wake
        self._beat_every = beat_every
        self.lag = ConsumerLag()
        self.error: str | None = None

    async def run(self) -> None:
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._url,
                    autocommit=True,
                    prepare_threshold=None,
                    application_name="mailboat consumer",
                    connect_timeout=10,
                ) as connection:
                    await self._watch(connection)
            except (psycopg.Error, OSError) as error:
                self.error = error_message(error)
                log.debug("The consumer's second connection was lost: %s", self.error)
            finally:
                self._wake.notified = False
            await asyncio.sleep(1.0)

    async def _watch(self, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("listen mailboat")
        maintained_at = 0.0
        try:
            while True:
                if time.monotonic() - maintained_at > _MAINTAIN_EVERY or not maintained_at:
                    await connection.execute(
                        "select mailboat.maintain(%(subscription)s, outbox => %(outbox)s)", self._parameters
                    )
                    maintained_at = time.monotonic()
                await connection.execute(
                    "select mailboat.heartbeat(%(subscription)s, %(instance)s, make_interval(secs => %(idle_for)s),"
                    " outbox => %(outbox)s)",
                    self._parameters,
                )
                # A pooler may accept LISTEN and deliver nothing. Receiving our own notification proves delivery.
                await connection.execute("select pg_notify('mailboat', %s)", [self._instance])
                cursor = await connection.execute(
                    "select * from mailboat.pull_lag(%(subscription)s, outbox => %(outbox)s)", self._parameters
                )
                row = await cursor.fetchone()
                if row is not None:
                    self.lag = ConsumerLag(*row)
                self.error = None
                self._wake.set()
                received = False
                async for each in connection.notifies(timeout=self._beat_every):
                    received = received or each.payload == self._instance
                    self._wake.notified = received or self._wake.notified
                    if each.payload != self._instance:
                        self._wake.set()
                self._wake.notified = received
        finally:
            try:
                await connection.execute(
                    "select mailboat.leave(%(subscription)s, %(instance)s, outbox => %(outbox)s)", self._parameters
                )
            except psycopg.Error:
                pass
