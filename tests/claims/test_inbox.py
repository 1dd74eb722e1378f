"""The Postgres inbox: effects exactly once, and attempts that survive the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import UUID, uuid4

import psycopg
import pytest
import pytest_asyncio
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from mailboat.consumer.broker.interfaces import (
    Busy,
    Claim,
    Claimed,
    ClaimReply,
    ClaimsUnavailable,
    FailedAttempt,
    Finished,
)
from mailboat.consumer.claims.inbox import InboxClaims, InboxExecution
from mailboat.consumer.dispatch import Dispatcher, NotHandled
from mailboat.consumer.handlers import handler
from mailboat.consumer.pull_statements import PullArguments
from mailboat.consumer.received_event import Event
from mailboat.consumer.transactions import Psycopg, PsycopgAsync, SqlAlchemy, SqlAlchemyAsync
from mailboat.errors import ConfigError
from mailboat_devservers.postgres import Database
from support.databases import logged_in
from support.wait import await_until

NAME = "shop/billing"
ARGUMENTS = PullArguments(NAME, None, None)
E1, E2 = str(uuid4()), str(uuid4())


class InboxFactory(Protocol):
    async def __call__(self, **options: Any) -> InboxClaims: ...


@pytest.fixture
def inbox_database(outbox: Database) -> Database:
    outbox.execute("create table effects (event_id uuid not null)")
    return outbox


@pytest_asyncio.fixture
async def inbox(inbox_database: Database) -> AsyncIterator[InboxFactory]:
    """``await inbox(instance="a")`` opens a store, closed after the test."""
    opened: list[InboxClaims] = []

    async def open_inbox(**options: Any) -> InboxClaims:
        store = InboxClaims(options.pop("url", inbox_database.url), consumer=NAME, **options)
        opened.append(store)
        await store.open()
        return store

    yield open_inbox
    for store in opened:
        await store.close()


def event(event_id: str = E1) -> Event:
    return Event(id=UUID(event_id), type="order.placed", created_at=datetime.now(UTC))


async def claimed(store: InboxClaims, event_id: str = E1, *, replay: bool = False) -> ClaimReply:
    (reply,) = await store.claim([Claim(event_id, replay)])
    return reply


# -- attempts ---------------------------------------------------------------------------------------------------------


async def test_attempts_and_due_times_are_shared_and_survive_a_restart(inbox: InboxFactory) -> None:
    one, two = await inbox(instance="one"), await inbox(instance="two")
    assert await claimed(one) == Claimed(1)
    assert isinstance(await claimed(one), Busy)
    assert isinstance(await claimed(two), Busy)
    await one.release([E1])
    assert await claimed(two) == Claimed(1)
    await two.fail([FailedAttempt(E1, 60)])
    parked = await claimed(one)
    assert isinstance(parked, Busy)
    assert 30 < parked.seconds <= 60
    first, second = await one.claim([Claim(E2), Claim(E1)])
    assert first == Claimed(1)
    assert isinstance(second, Busy)
    await one.fail([FailedAttempt(E2, 0)])
    assert await claimed(two, E2) == Claimed(2)
    await two.fail([FailedAttempt(E2, 0, counted=False)])
    assert await claimed(one, E2) == Claimed(2)
    await one.dead([E2])
    assert await claimed(two, E2) == Finished(dead=True)
    assert await claimed(two, E2, replay=True) == Claimed(1)


async def test_an_event_that_kills_its_process_is_found(inbox: InboxFactory, inbox_database: Database) -> None:
    dying = await inbox(instance="dying", life="1", lease=600)
    lethal, harmless = E1, E2
    assert await dying.claim([Claim(lethal), Claim(harmless)]) == [Claimed(1), Claimed(1)]
    await dying.fail([FailedAttempt(harmless, 0)])
    other = await inbox(instance="other", lease=600)
    assert isinstance(await claimed(other, lethal), Busy)
    reborn = await inbox(instance="dying", life="2")  # a restarted container does not wait for the lease
    assert await claimed(reborn, lethal) == Claimed(2, 1)
    inbox_database.execute(
        "update mailboat.inbox_holders set expires_at = now() - interval '1 s' where instance = 'dying'"
    )
    assert await other.claim([Claim(lethal), Claim(harmless)]) == [Claimed(3, 2), Claimed(2)]


async def test_an_event_that_was_handled_before_the_process_died_is_done(
    inbox: InboxFactory, inbox_database: Database
) -> None:
    store = await inbox(instance="a", life="1")
    assert await claimed(store) == Claimed(1)
    inbox_database.execute(f"select mailboat.once('{NAME}', '{E1}')")
    reborn = await inbox(instance="a", life="2")
    assert await claimed(reborn) == Finished()
    assert inbox_database.execute("select count(*) from mailboat.inbox_attempts") == [(0,)]


async def test_leases_are_renewed_and_old_marks_pruned(inbox: InboxFactory, inbox_database: Database) -> None:
    inbox_database.execute(
        f"insert into mailboat.handled select '{NAME}', gen_random_uuid(), now() - interval '2 hours'"
        " from generate_series(1, 10001)"
    )
    store = await inbox(instance="a", lease=0.3, ttl=3600, prune_every=0)
    await claimed(store)
    inbox_database.execute("delete from mailboat.inbox_holders")  # as if another process had expired this one
    await await_until(lambda: inbox_database.execute("select count(*) from mailboat.handled") == [(0,)])
    running = inbox_database.execute("select running from mailboat.inbox_holders where expires_at > now()")
    assert running == [([UUID(E1)],)]


async def test_a_role_needs_the_grant_and_nothing_else(inbox: InboxFactory, inbox_database: Database) -> None:
    with logged_in(inbox_database, "mailboat_consumer") as url:
        with pytest.raises(ConfigError, match="may not consume shop/billing"):
            await inbox(url=url)
        role = f"mailboat_consumer_{inbox_database.name}"
        inbox_database.execute(f"select mailboat.grant_consumer('{NAME}', '{role}')")
        store = await inbox(url=url, lease=0.3, prune_every=0)
        assert await claimed(store) == Claimed(1)
        await store.fail([FailedAttempt(E1, 0)])
        assert await claimed(store) == Claimed(2)
        await store.done([E1])
        await store.close()


# -- the transaction --------------------------------------------------------------------------------------------------

Opener = Callable[[], Awaitable[Any]]
Handling = Callable[[Any], Any]


async def psycopg_async(event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
    await tx.execute("insert into effects values (%s)", [event.id])


def psycopg_sync(event: Event, tx: psycopg.Connection[Any]) -> None:
    tx.execute("insert into effects values (%s)", [event.id])


async def sqlalchemy_async(event: Event, tx: AsyncConnection) -> None:
    await tx.execute(text("insert into effects values (:id)"), {"id": event.id})


def sqlalchemy_sync(event: Event, tx: Connection) -> None:
    tx.execute(text("insert into effects values (:id)"), {"id": event.id})


@pytest_asyncio.fixture(
    params=[psycopg_async, psycopg_sync, sqlalchemy_async, sqlalchemy_sync], ids=lambda f: f.__name__
)
async def execution(request: pytest.FixtureRequest, inbox_database: Database) -> AsyncIterator[InboxExecution]:
    url, sqlalchemy_url = inbox_database.url, inbox_database.url.replace("postgresql:", "postgresql+psycopg:")
    engine, async_engine = create_engine(sqlalchemy_url), create_async_engine(sqlalchemy_url)
    openers: dict[Any, Opener] = {
        psycopg_async: lambda: PsycopgAsync.open(url, ARGUMENTS),
        psycopg_sync: lambda: Psycopg.open(url, ARGUMENTS),
        sqlalchemy_async: lambda: SqlAlchemyAsync.open(async_engine, ARGUMENTS),
        sqlalchemy_sync: lambda: SqlAlchemy.open(engine, ARGUMENTS),
    }
    execution = InboxExecution(openers[request.param], consumer=NAME)
    execution.effect = request.param  # type: ignore[attr-defined]
    yield execution
    await execution.close()
    engine.dispose()
    await async_engine.dispose()


def dispatcher(*functions: Any) -> Dispatcher:
    found = Dispatcher(NAME)
    for function in functions:
        found.add(handler("*", function))
    return found


async def run(execution: InboxExecution, *functions: Any) -> bool:
    found = dispatcher(*functions)

    async def dispatch(event: Event, scope: Any) -> bool:
        await found.handle((event,), scope)
        return True

    return await execution.run(event(), dispatch)


async def test_effect_and_mark_commit_together_or_not_at_all(
    execution: InboxExecution, inbox_database: Database
) -> None:
    effect: Any = execution.effect  # type: ignore[attr-defined]

    def fails(event: Event) -> None:
        raise RuntimeError("no")

    def effects() -> int:
        ((count,),) = inbox_database.execute("select count(*) from effects")
        return int(count)

    with pytest.raises(NotHandled, match="HandlerFailed"):
        await run(execution, effect, fails)
    assert effects() == 0
    assert await run(execution, effect) is True
    assert await run(execution, effect) is False
    assert effects() == 1


async def test_a_handler_that_hides_an_error_or_rolls_back_is_not_taken_for_done(inbox_database: Database) -> None:
    execution = InboxExecution(lambda: PsycopgAsync.open(inbox_database.url, ARGUMENTS), consumer=NAME)

    async def hides(event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        try:
            await tx.execute("select 1 / 0")
        except psycopg.Error:
            pass

    async def rolls_back(event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        await psycopg_async(event, tx)
        await tx.rollback()

    async def deadlocks(event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        raise psycopg.errors.DeadlockDetected("deadlock detected")

    async def loses(event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        await psycopg_async(event, tx)
        await tx.execute("select pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        await run(execution, hides)
    with pytest.raises(RuntimeError, match="leave commit and rollback to Mailboat"):
        await run(execution, rolls_back)
    for interrupted in (deadlocks, loses):  # costs no attempt
        with pytest.raises(ClaimsUnavailable):
            await run(execution, interrupted)
    assert inbox_database.execute("select count(*) from effects") == [(0,)]
    assert await run(execution, psycopg_async) is True
    await execution.close()
