"""The Postgres inbox: an event is marked as handled in the transaction of its effects, so both happen exactly once.

``InboxExecution`` opens the transaction, calls ``mailboat.once``, runs the handlers with the transaction and commits.
The mark also decides between two consumers with the same event: the second one waits for the transaction of the first.

``InboxClaims`` counts attempts. Each process has one row with the events that it is handling and a lease, renewed in a
thread. A process that dies leaves its row behind; the next claim of any process counts an attempt for each of its
events that has no mark. So the smooth path costs one statement per claim call, and only failed events have rows of
their own. The functions are in ``store/schema/migrations/0001_schema/80_inbox.sql``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from mailboat.consumer.broker.interfaces import (
    Busy,
    Claim,
    Claimed,
    ClaimReply,
    ClaimsUnavailable,
    Dispatch,
    FailedAttempt,
    Finished,
)
from mailboat.consumer.claims.owner import DEFAULT_LEASE, DEFAULT_TTL, owner_of
from mailboat.consumer.claims.renewal import Renewal
from mailboat.consumer.dispatch import NotHandled
from mailboat.consumer.received_event import Event
from mailboat.consumer.transactions import InboxSession, error_message, is_transient, sqlstate
from mailboat.errors import ConfigError

log = logging.getLogger(__name__)

_CLAIM: Final = (
    b"select state, attempt, deaths, wait from mailboat.inbox_claim(%s, %s, %s, %s, %s::uuid[], %s::uuid[], %s::uuid[])"
)
_RENEW: Final = b"select mailboat.inbox_renew(%s, %s, %s, %s, %s::uuid[])"
_FAIL: Final = b"select mailboat.inbox_fail(%s, %s, %s, %s::uuid[], %s::int[], %s::int[], %s::float8[], %s)"
_DONE: Final = b"select mailboat.inbox_done(%s, %s::uuid[])"
_LEAVE: Final = b"select mailboat.inbox_leave(%s, %s, %s)"
_PRUNE: Final = b"select mailboat.prune_handled(%s, %s, %s)"
_NEEDS_A_PERSON: Final = ("3F000", "42883", "42501")
"""SQLSTATEs: no schema, no such function, no right."""
_PRUNED_AT_ONCE: Final = 10_000
_SETTINGS: Final[dict[str, Any]] = {
    "application_name": "mailboat inbox",
    "connect_timeout": 10,
    "autocommit": True,
    "prepare_threshold": None,  # there may be a pooler
}


class InboxClaims:
    """A ClaimStore in the database of the effects."""

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        ttl: float = DEFAULT_TTL,
        lease: float = DEFAULT_LEASE,
        instance: str | None = None,
        life: str | None = None,
        prune_every: float = 60.0,
    ) -> None:
        """``url``: of libpq. ``instance``: as in RedisClaims. Marks older than ``ttl`` are deleted."""
        self._url = url
        self._consumer = consumer
        self._ttl = timedelta(seconds=ttl)
        self._lease = timedelta(seconds=lease)
        name, _, incarnation = owner_of(instance, life).partition(":")
        self._owner = (consumer, name, incarnation)
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self._thread_connection: Any = None
        self._claimed: dict[str, Claimed] = {}
        self._renewal = Renewal(self._renew, lease=lease, check=self._prune, check_every=prune_every)

    async def open(self) -> None:
        """Connect and start the renewals. Raises ConfigError if the schema or a right is missing."""
        try:
            await self._execute(_RENEW, [*self._owner, self._lease, []])
        except ClaimsUnavailable as error:
            if sqlstate(error) in _NEEDS_A_PERSON:
                raise ConfigError(f"{error}. Is the schema up to date (mailboat migrate)?") from error
            raise
        self._renewal.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._renewal.stop)
        if self._thread_connection is not None:
            await asyncio.to_thread(self._thread_connection.close)
        if self._connection is None:
            return
        try:
            await self._execute(_LEAVE, [*self._owner])
        except ClaimsUnavailable as error:
            log.debug("The inbox could not be left: %s", error)
        await self._connection.close()

    async def claim(self, claims: Sequence[Claim]) -> list[ClaimReply]:
        pending = [claim for claim in claims if claim.event_id not in self._claimed]
        if not pending:
            return [Busy(self._lease.total_seconds() / 3)] * len(claims)
        ids = [claim.event_id for claim in pending]
        replays = [claim.event_id for claim in pending if claim.replay]
        rows = await self._execute(_CLAIM, [*self._owner, self._lease, list(self._claimed), ids, replays])
        found: dict[str, ClaimReply] = {event_id: _reply(row) for event_id, row in zip(ids, rows, strict=True)}
        claimed = {event_id: reply for event_id, reply in found.items() if isinstance(reply, Claimed)}
        self._claimed.update(claimed)
        self._renewal.hold(list(claimed))
        return [found.get(claim.event_id, Busy(self._lease.total_seconds() / 3)) for claim in claims]

    async def done(self, event_ids: Sequence[str]) -> list[bool]:
        """The mark was committed with the effects. Only the attempts of events that failed before are deleted here."""
        retried = [event_id for event_id in event_ids if self._claimed.get(event_id, Claimed(1)).attempt > 1]
        if retried:
            await self._execute(_DONE, [self._consumer, retried])
        self._drop(event_ids)
        return [True] * len(event_ids)

    async def fail(self, failures: Sequence[FailedAttempt]) -> list[bool]:
        await self._fail(failures)
        return [True] * len(failures)

    async def dead(self, event_ids: Sequence[str]) -> list[bool]:
        await self._fail([FailedAttempt(event_id, 0.0) for event_id in event_ids], dead=True)
        return [True] * len(event_ids)

    async def release(self, event_ids: Sequence[str]) -> None:
        await self._fail([FailedAttempt(event_id, 0.0, counted=False) for event_id in event_ids])

    async def _fail(self, failures: Sequence[FailedAttempt], *, dead: bool = False) -> None:
        if not failures:
            return
        ids = [failure.event_id for failure in failures]
        claims = [self._claimed.get(event_id, Claimed(1)) for event_id in ids]
        attempts = [claim.attempt - (not failure.counted) for claim, failure in zip(claims, failures, strict=True)]
        deaths = [claim.redeliveries for claim in claims]
        longest = self._ttl.total_seconds()
        retry_in = [min(max(failure.retry_in, 0.0), longest) for failure in failures]
        await self._execute(_FAIL, [*self._owner, ids, attempts, deaths, retry_in, dead])
        self._drop(ids)

    def _drop(self, event_ids: Sequence[str]) -> None:
        self._renewal.drop(event_ids)
        for event_id in event_ids:
            self._claimed.pop(event_id, None)

    async def _execute(self, statement: bytes, parameters: list[Any]) -> list[tuple[Any, ...]]:
        """Run a statement; once more on a new connection if the old one was lost. All statements may be repeated."""
        import psycopg

        async with self._connecting:
            for repeated in (False, True):
                try:
                    if self._connection is None or self._connection.closed:
                        self._connection = await psycopg.AsyncConnection.connect(self._url, **_SETTINGS)
                    cursor = await self._connection.execute(statement, parameters)
                    return list(await cursor.fetchall())
                except psycopg.Error as error:
                    lost = self._connection is not None and self._connection.closed
                    if not lost or repeated:
                        raise unavailable(error, self._consumer) from error
        raise AssertionError("the second round returns or raises")

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _renew(self, event_ids: Sequence[str]) -> list[str]:
        self._execute_in_thread(_RENEW, [*self._owner, self._lease, list(event_ids)])
        return []

    def _prune(self) -> None:
        while self._execute_in_thread(_PRUNE, [self._consumer, self._ttl, _PRUNED_AT_ONCE])[0][0] == _PRUNED_AT_ONCE:
            log.debug("Old marks pruned", extra={"consumer": self._consumer})

    def _execute_in_thread(self, statement: bytes, parameters: list[Any]) -> list[tuple[Any, ...]]:
        import psycopg

        try:
            if self._thread_connection is None or self._thread_connection.closed:
                self._thread_connection = psycopg.connect(self._url, **_SETTINGS)
            return list(self._thread_connection.execute(statement, parameters).fetchall())
        except psycopg.Error as error:
            raise unavailable(error, self._consumer) from error


def _reply(row: tuple[Any, ...]) -> ClaimReply:
    state, attempt, deaths, wait = row
    match state:
        case "claimed":
            return Claimed(attempt, deaths)
        case "wait":
            return Busy(wait)
        case _:
            return Finished(dead=state == "dead")


def unavailable(error: BaseException, consumer: str) -> ClaimsUnavailable:
    """Return the error for the engine, with the server's message."""
    return ClaimsUnavailable(f"inbox of consumer {consumer}: {error_message(error)}")


class InboxExecution:
    """Runs the handlers of an event inside the transaction that marks it. One connection per event at a time."""

    def __init__(self, open_session: Callable[[], Awaitable[InboxSession]], *, consumer: str) -> None:
        self._open_session = open_session
        self._consumer = consumer
        self._idle: list[InboxSession] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, event: Event, dispatch: Dispatch) -> bool:
        session = await self._take()
        try:
            first = await self._run(session, event, dispatch)
        except Exception:
            await _quietly(session.rollback())
            self._idle.append(session)
            raise
        except BaseException:  # cancelled: a statement, or a synchronous handler, may still be running
            self._discard(session)
            raise
        self._idle.append(session)
        return first

    async def _take(self) -> InboxSession:
        while self._idle:
            session = self._idle.pop()
            if not session.is_lost():
                return session
            self._discard(session)
        try:
            return await self._open_session()
        except Exception as error:  # drivers have different exception classes
            raise unavailable(error, self._consumer) from error

    async def _run(self, session: InboxSession, event: Event, dispatch: Dispatch) -> bool:
        """Mark, handle, commit. On any error the caller rolls back."""
        if not await self._marked(session, event):
            await self._commit(session)
            return False
        try:
            await dispatch(event, session)
        except NotHandled as failure:
            if session.is_lost() or (failure.__cause__ is not None and is_transient(failure.__cause__)):
                raise unavailable(failure.__cause__ or failure, self._consumer) from failure
            raise
        # The mark must still be there: a handler that caught an error of the database, or rolled back, has undone it.
        try:
            undone = await session.once(self._consumer, event.id)
        except Exception as error:
            if session.is_lost():
                raise unavailable(error, self._consumer) from error
            raise
        if undone:
            raise RuntimeError("the handler rolled the transaction back: it must leave commit and rollback to Mailboat")
        await self._commit(session)
        return True

    async def _marked(self, session: InboxSession, event: Event) -> bool:
        try:
            return await session.once(self._consumer, event.id)
        except Exception as error:
            raise unavailable(error, self._consumer) from error

    async def _commit(self, session: InboxSession) -> None:
        """Commit. If the connection is lost here, the result is unknown: the mark answers the next attempt."""
        try:
            await session.commit()
        except Exception as error:
            if session.is_lost() or is_transient(error):
                raise unavailable(error, self._consumer) from error
            raise  # a deferred constraint: the handler's fault

    def _discard(self, session: InboxSession) -> None:
        """Close the connection without waiting: a synchronous handler that timed out may still use it."""
        closing = asyncio.create_task(_quietly(session.close()))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        while self._idle:
            self._discard(self._idle.pop())
        if self._closing:
            await asyncio.wait(self._closing)


async def _quietly(ending: Awaitable[None]) -> None:
    try:
        await ending
    except Exception as error:
        log.debug("A connection ended badly: %s", error)
