"""One worker's connection. The pull and the writes of handlers share one transaction.

Four implementations, chosen by the annotations of the handlers: psycopg and SQLAlchemy, synchronous and asynchronous. A
synchronous connection has a dedicated thread, in which the handlers run as well.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, Self
from uuid import UUID

from mailboat.consumer.dispatch import Scope
from mailboat.consumer.handler_outcomes import Refusal
from mailboat.consumer.handlers import TransactionKind
from mailboat.consumer.pull_statements import (
    ONCE,
    PSYCOPG_ONCE,
    PSYCOPG_PULL,
    PSYCOPG_REFUSE,
    PULL,
    REFUSE,
    PullArguments,
    event_of,
)
from mailboat.consumer.received_event import Event
from mailboat_spec.redaction import primary_message


class WorkerSession(Scope, Protocol):
    """Interface of a worker's connection in the pull engine."""

    async def pull(self) -> list[Event]:
        """Begin a transaction and pull the next events in it."""
        ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...

    async def refuse(self, event_id: UUID, refusal: Refusal) -> str:
        """Refuse an event in a separate transaction and return the outcome for the event."""
        ...

    def is_lost(self) -> bool:
        """Return whether the connection is lost, and its transaction with it."""
        ...

    async def close(self) -> None: ...


class InboxSession(Scope, Protocol):
    """Interface of a connection of the inbox, for consumers behind a broker."""

    async def once(self, consumer: str, event_id: UUID) -> bool:
        """Mark an event as handled, in the open transaction or in a new one; return False if it is marked already."""
        ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...

    def is_lost(self) -> bool: ...

    async def close(self) -> None: ...


def sqlstate(error: BaseException | None) -> str:
    """Return the SQLSTATE of a driver's error or of its causes; empty if there is none."""
    while error is not None:
        original = getattr(error, "orig", None) or error
        code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
        if isinstance(code, str):
            return code
        error = error.__cause__
    return ""


def error_message(error: BaseException) -> str:
    """Return the server's error message with its hint, without the statement."""
    original = getattr(error, "orig", None) or error
    message = primary_message(original).partition("\n")[0]
    hint = getattr(getattr(original, "diag", None), "message_hint", None)
    return f"{message}. {hint}" if hint else message


def is_transient(error: BaseException) -> bool:
    """Return whether the transaction can be retried, as after a serialization failure or a deadlock."""
    return sqlstate(error).startswith("40")


_SETTINGS: Final[dict[str, Any]] = {"application_name": "mailboat consumer", "connect_timeout": 10}


class PsycopgAsync:
    """psycopg's AsyncConnection. Prepared statements are disabled because of possible poolers."""

    def __init__(self, connection: Any, arguments: PullArguments) -> None:
        self._connection = connection
        self._arguments = arguments

    @classmethod
    async def open(cls, url: str, arguments: PullArguments) -> Self:
        import psycopg

        return cls(await psycopg.AsyncConnection.connect(url, prepare_threshold=None, **_SETTINGS), arguments)

    def transaction(self, kind: TransactionKind) -> Any:
        return self._connection

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)

    async def pull(self) -> list[Event]:
        cursor = self._connection.cursor(binary=True)
        await cursor.execute(PSYCOPG_PULL, self._arguments.pull)
        return [event_of(row) for row in await cursor.fetchall()]

    async def once(self, consumer: str, event_id: UUID) -> bool:
        cursor = await self._connection.execute(PSYCOPG_ONCE, [consumer, str(event_id)])
        return bool((await cursor.fetchone())[0])

    async def commit(self) -> None:
        await self._connection.commit()

    async def rollback(self) -> None:
        await self._connection.rollback()

    async def refuse(self, event_id: UUID, refusal: Refusal) -> str:
        cursor = await self._connection.execute(PSYCOPG_REFUSE, self._arguments.refusal(event_id, refusal))
        (outcome,) = await cursor.fetchone()
        await self._connection.commit()
        return str(outcome)

    def is_lost(self) -> bool:
        return bool(self._connection.closed)

    async def close(self) -> None:
        await self._connection.close()


class _InThread:
    """A synchronous connection in a dedicated thread."""

    def __init__(self, arguments: PullArguments) -> None:
        self._arguments = arguments
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mailboat-consumer")

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class Psycopg(_InThread):
    """psycopg's Connection."""

    _connection: Any

    @classmethod
    async def open(cls, url: str, arguments: PullArguments) -> Self:
        import psycopg

        opened = cls(arguments)
        try:
            opened._connection = await opened.in_thread(
                lambda: psycopg.connect(url, prepare_threshold=None, **_SETTINGS)
            )
        except BaseException:
            opened._thread.shutdown(wait=False)
            raise
        return opened

    def transaction(self, kind: TransactionKind) -> Any:
        return self._connection

    async def pull(self) -> list[Event]:
        def pull() -> list[Event]:
            cursor = self._connection.cursor(binary=True)
            return [event_of(row) for row in cursor.execute(PSYCOPG_PULL, self._arguments.pull).fetchall()]

        events: list[Event] = await self.in_thread(pull)
        return events

    async def once(self, consumer: str, event_id: UUID) -> bool:
        parameters = [consumer, str(event_id)]
        return bool(await self.in_thread(lambda: self._connection.execute(PSYCOPG_ONCE, parameters).fetchone()[0]))

    async def commit(self) -> None:
        await self.in_thread(self._connection.commit)

    async def rollback(self) -> None:
        await self.in_thread(self._connection.rollback)

    async def refuse(self, event_id: UUID, refusal: Refusal) -> str:
        def refuse() -> str:
            (outcome,) = self._connection.execute(PSYCOPG_REFUSE, self._arguments.refusal(event_id, refusal)).fetchone()
            self._connection.commit()
            return str(outcome)

        outcome: str = await self.in_thread(refuse)
        return outcome

    def is_lost(self) -> bool:
        return bool(self._connection.closed)

    async def close(self) -> None:
        await self.in_thread(self._connection.close)
        self._thread.shutdown(wait=False)


class SqlAlchemy(_InThread):
    """SQLAlchemy's Connection, and a Session on it for handlers that require one."""

    _connection: Any
    _session: Any = None

    @classmethod
    async def open(cls, engine: Any, arguments: PullArguments) -> Self:
        opened = cls(arguments)
        try:
            opened._connection = await opened.in_thread(engine.connect)
        except BaseException:
            opened._thread.shutdown(wait=False)
            raise
        return opened

    def transaction(self, kind: TransactionKind) -> Any:
        if kind is not TransactionKind.SQLALCHEMY_SESSION:
            return self._connection
        if self._session is None:
            from sqlalchemy.orm import Session as OrmSession

            self._session = OrmSession(bind=self._connection, join_transaction_mode="rollback_only")
        return self._session

    async def pull(self) -> list[Event]:
        rows: list[Event] = await self.in_thread(
            lambda: [event_of(row) for row in self._run(PULL, self._arguments.pull)]
        )
        return rows

    async def once(self, consumer: str, event_id: UUID) -> bool:
        return bool(await self.in_thread(lambda: self._run(ONCE, (consumer, str(event_id)))[0][0]))

    def _run(self, statement: str, values: Sequence[Any]) -> Any:
        from sqlalchemy import text

        named = {f"p{number}": value for number, value in enumerate(values, start=1)}
        return self._connection.execute(text(statement), named).fetchall()

    async def commit(self) -> None:
        def commit() -> None:
            if self._session is not None:
                self._session.flush()
            self._connection.commit()
            self._end_session()

        await self.in_thread(commit)

    async def rollback(self) -> None:
        def rollback() -> None:
            self._end_session()
            self._connection.rollback()

        await self.in_thread(rollback)

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    async def refuse(self, event_id: UUID, refusal: Refusal) -> str:
        def refuse() -> str:
            ((outcome,),) = self._run(REFUSE, self._arguments.refusal(event_id, refusal))
            self._connection.commit()
            return str(outcome)

        outcome: str = await self.in_thread(refuse)
        return outcome

    def is_lost(self) -> bool:
        return bool(self._connection.invalidated or self._connection.closed)

    async def close(self) -> None:
        await self.in_thread(self._connection.close)
        self._thread.shutdown(wait=False)


class SqlAlchemyAsync:
    """SQLAlchemy's AsyncConnection, and an AsyncSession on it for handlers that require one."""

    def __init__(self, connection: Any, arguments: PullArguments) -> None:
        self._connection = connection
        self._arguments = arguments
        self._session: Any = None

    @classmethod
    async def open(cls, engine: Any, arguments: PullArguments) -> Self:
        return cls(await engine.connect(), arguments)

    def transaction(self, kind: TransactionKind) -> Any:
        if kind is not TransactionKind.SQLALCHEMY_ASYNC_SESSION:
            return self._connection
        if self._session is None:
            from sqlalchemy.ext.asyncio import AsyncSession

            self._session = AsyncSession(bind=self._connection, join_transaction_mode="rollback_only")
        return self._session

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)

    async def pull(self) -> list[Event]:
        return [event_of(row) for row in await self._run(PULL, self._arguments.pull)]

    async def once(self, consumer: str, event_id: UUID) -> bool:
        return bool((await self._run(ONCE, (consumer, str(event_id))))[0][0])

    async def _run(self, statement: str, values: Sequence[Any]) -> Any:
        from sqlalchemy import text

        named = {f"p{number}": value for number, value in enumerate(values, start=1)}
        return (await self._connection.execute(text(statement), named)).fetchall()

    async def commit(self) -> None:
        if self._session is not None:
            await self._session.flush()
        await self._connection.commit()
        await self._end_session()

    async def rollback(self) -> None:
        await self._end_session()
        await self._connection.rollback()

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def refuse(self, event_id: UUID, refusal: Refusal) -> str:
        ((outcome,),) = await self._run(REFUSE, self._arguments.refusal(event_id, refusal))
        await self._connection.commit()
        return str(outcome)

    def is_lost(self) -> bool:
        return bool(self._connection.invalidated or self._connection.closed)

    async def close(self) -> None:
        await self._connection.close()
