"""Connections of a consumer to its database, with the driver that the handlers want."""

import asyncio
from typing import Any

from mailboat.consumer.handlers import TransactionKind
from mailboat.consumer.pull_statements import PullArguments
from mailboat.consumer.transactions import Psycopg, PsycopgAsync, SqlAlchemy, SqlAlchemyAsync

OpenedSession = Psycopg | PsycopgAsync | SqlAlchemy | SqlAlchemyAsync


class SessionFactory:
    """Opens sessions. An SQLAlchemy engine is created on demand, unless the application gives its own."""

    def __init__(
        self, kind: TransactionKind | None, url: str | None, arguments: PullArguments, *, size: int, engine: Any = None
    ) -> None:
        """``size``: number of sessions that are open at the same time."""
        self._kind = kind
        self._libpq = libpq_url(url)
        self._arguments = arguments
        self._engine: Any = None
        self._owned = False
        if kind is not None and kind.vendor == "sqlalchemy":
            self._engine, self._owned = engine or _new_engine(kind, url, size), engine is None

    async def open(self) -> OpenedSession:
        kind = self._kind
        if kind is None or kind is TransactionKind.PSYCOPG_ASYNC:
            return await PsycopgAsync.open(self._libpq, self._arguments)
        if kind is TransactionKind.PSYCOPG:
            return await Psycopg.open(self._libpq, self._arguments)
        if kind.is_async:
            return await SqlAlchemyAsync.open(self._engine, self._arguments)
        return await SqlAlchemy.open(self._engine, self._arguments)

    async def close(self) -> None:
        """Close the engine, if it was created here."""
        if self._owned:
            disposed = self._engine.dispose()
            if asyncio.iscoroutine(disposed):
                await disposed


def _new_engine(kind: TransactionKind, url: str | None, size: int) -> Any:
    from sqlalchemy import create_engine, make_url
    from sqlalchemy.ext.asyncio import create_async_engine

    target = make_url(url or "")
    if "+" not in target.drivername:
        target = target.set(drivername="postgresql+psycopg")
    return (create_async_engine if kind.is_async else create_engine)(target, pool_size=size, max_overflow=0)


def libpq_url(url: str | None) -> str:
    """Return the URL without SQLAlchemy's driver suffix of the scheme, which libpq does not accept."""
    scheme, separator, rest = (url or "").partition("://")
    return f"{scheme.partition('+')[0]}{separator}{rest}"
