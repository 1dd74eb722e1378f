"""`mailboat.Consumer` on pull subscriptions, on a real database: handlers, transactions, outcomes (C1 to C9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest
import sqlalchemy
import yaml
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

import mailboat
from mailboat import Consumer, Event, Ignore, Refuse, RetryLater, emit
from mailboat.consumer.pull_source import Pace
from mailboat.errors import ConfigError
from mailboat_devservers.pgbouncer import PgBouncer, start_pgbouncer
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres import Database, PostgresServer, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from support.manifests import event_subscription, outbox_relay_on
from support.wait import await_until

QUICK = Pace(first=0.01, longest=0.05, longest_notified=0.05)
NO_WAIT = {"backoff": {"initial": "1ms", "max": "1ms", "jitter": 0.0}}


class Order(BaseModel):
    number: int


@pytest.fixture
def outbox(outbox: Database) -> Database:
    outbox.execute("create table effects (ordinal bigserial, number int, handler text)")
    return outbox


def consumer(outbox: Database, *, delivery: dict[str, Any] | None = None, **spec: Any) -> Consumer:
    spec = {"partitions": 2, **spec, "delivery": {**NO_WAIT, **(delivery or {})}}
    return Consumer("shop/view", url=outbox.url, spec=spec, pace=QUICK)


@asynccontextmanager
async def serving(*consumers: Consumer) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for each in consumers:
            group.create_task(each.serve(stop))
        try:
            yield
        finally:
            stop.set()


def write(outbox: Database, *numbers: int, key: str | None = "k", type: str = "order.placed", **event: Any) -> None:
    with psycopg.connect(outbox.url) as connection:
        for number in numbers:
            emit(connection, type, {"number": number}, key=key or str(number), **event)


def effects(outbox: Database) -> list[int]:
    return [number for (number,) in outbox.execute("select number from effects order by ordinal")]


def dead(outbox: Database) -> list[tuple[Any, ...]]:
    return outbox.execute(
        "select (convert_from(payload, 'UTF8')::json ->> 'number')::int, reason, attempts"
        " from mailboat.dead_letters order by 1"
    )


INSERT = "insert into effects (number) values (%s)"
NAMED = sqlalchemy.text("insert into effects (number) values (:number)")


def with_psycopg(order: Order, tx: psycopg.Connection[Any]) -> None:
    tx.execute(INSERT, [order.number])


async def with_async_psycopg(order: Order, tx: psycopg.AsyncConnection[Any]) -> None:
    await tx.execute(INSERT, [order.number])


def with_sqlalchemy(order: Order, tx: sqlalchemy.Connection) -> None:
    tx.execute(NAMED, {"number": order.number})


def with_session(order: Order, tx: Session) -> None:
    tx.execute(NAMED, {"number": order.number})


async def with_async_sqlalchemy(order: Order, tx: AsyncConnection) -> None:
    await tx.execute(NAMED, {"number": order.number})


async def with_async_session(order: Order, tx: AsyncSession) -> None:
    await tx.execute(NAMED, {"number": order.number})


@pytest.mark.parametrize(
    "write_effect",
    [with_psycopg, with_async_psycopg, with_sqlalchemy, with_session, with_async_sqlalchemy, with_async_session],
)
async def test_effects_in_the_handlers_transaction_happen_once_and_in_order(
    outbox: Database, write_effect: Any
) -> None:
    """C2, C3: one event fails after its effect was written, and is retried."""
    view = consumer(outbox)
    view.on("order.*")(write_effect)
    failed: list[int] = []

    @view.on("order.placed")
    def fail_once(order: Order, event: Event) -> None:
        if order.number == 3 and not failed:
            failed.append(event.attempt)
            raise RuntimeError("once")

    async with serving(view):
        await asyncio.to_thread(write, outbox, *range(1, 11))
        await await_until(lambda: len(effects(outbox)) == 10, what="all effects")
    assert effects(outbox) == list(range(1, 11))
    assert (failed, dead(outbox)) == ([1], [])


async def test_a_handler_that_always_fails_holds_up_its_key_only_and_leaves_a_traceback(outbox: Database) -> None:
    view = consumer(outbox, delivery={"maxAttempts": 3})
    attempts: list[int] = []

    @view.on("order.*")
    async def project(order: Order, event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        if order.number == 2:
            attempts.append(event.attempt)
            raise LookupError("no such wallet")
        await tx.execute(INSERT, [order.number])

    await asyncio.to_thread(write, outbox, 1, 2, 3)
    await asyncio.to_thread(write, outbox, 10, 11, key="other")
    async with serving(view):
        await await_until(lambda: len(effects(outbox)) == 4, what="all other events")
    assert dead(outbox) == [(2, "HandlerFailed", 3)]
    assert [each for each in effects(outbox) if each < 10] == [1, 3]
    assert attempts == [1, 2, 3]
    ((error,),) = outbox.execute("select last_error from mailboat.dead_letters")
    assert "LookupError: no such wallet" in error
    assert "in project" in error


async def test_outcomes_of_handlers(outbox: Database) -> None:
    view = consumer(outbox)
    later: list[int] = []

    @view.on("order.*")
    async def decide(order: Order, tx: psycopg.AsyncConnection[Any]) -> None:
        match order.number:
            case 1:
                raise Ignore
            case 2:
                raise Refuse("negative total")
            case 3 if len(later) < 5:  # more often than maxAttempts
                later.append(3)
                raise RetryLater("bank closed", seconds=0.001)
        await tx.execute(INSERT, [order.number])

    await asyncio.to_thread(write, outbox, 1, 2, 3, 4, key=None)
    await asyncio.to_thread(write, outbox, 5, key=None, type="cart.emptied")
    outbox.execute("insert into mailboat.outbox (event_type, payload) values ('order.placed', '{\"number\": \"six\"}')")
    outbox.execute("insert into mailboat.outbox (event_type, payload) values ('order.placed', null)")
    async with serving(view):
        await await_until(lambda: sorted(effects(outbox)) == [3, 4], what="what is handled")
        await await_until(lambda: view.dispatcher.counts.handled == 3, what="the rest")
    assert view.dispatcher.counts.ignored == 1
    reasons = outbox.execute("select reason, attempts from mailboat.dead_letters order by reason")
    assert reasons == [("CannotDecode", 1), ("CannotDecode", 1), ("NoHandler", 1), ("Refused", 1)]


async def test_types_without_a_handler_may_be_ignored(outbox: Database) -> None:
    view = consumer(outbox, delivery={"noHandler": "Ignore"})

    @view.on("wanted")
    async def nothing(event: Event) -> None: ...

    write(outbox, 1, 2, type="unwanted")
    async with serving(view):
        await await_until(lambda: view.dispatcher.counts.handled == 2, what="both to pass")
    assert dead(outbox) == []


async def test_a_group_is_one_transaction_and_rolls_back_whole(outbox: Database) -> None:
    """120 events of one user with size 100. The last event raises in the first two attempts."""
    view = consumer(outbox, partitions=1)
    sizes: list[int] = []

    @view.batch("portal.*", group_by=("tenant", "user"), size=100)
    async def apply(events: list[Event], tx: psycopg.AsyncConnection[Any]) -> None:
        sizes.append(len(events))
        for event in events:
            await tx.execute(INSERT, [event.json()["number"]])
            if event.json()["number"] == 120 and len(sizes) < 3:
                raise RuntimeError("the last one")

    headers = {"tenant": "acme", "user": "1"}
    await asyncio.to_thread(write, outbox, *range(1, 121), type="portal.changed", headers=headers)
    async with serving(view):
        await await_until(lambda: len(effects(outbox)) == 120, what="the group")
    assert effects(outbox) == list(range(1, 121))
    assert sizes == [120, 120, 120]


async def test_of_a_batch_without_groups_the_culprit_is_found(outbox: Database) -> None:
    view = consumer(outbox, partitions=1, delivery={"maxAttempts": 2})

    @view.batch("order.*", size=10)
    def apply(events: list[Event], tx: psycopg.Connection[Any]) -> None:
        for event in events:
            tx.execute(INSERT, [event.json()["number"]])
            if event.json()["number"] == 7:
                raise RuntimeError("seven")

    await asyncio.to_thread(write, outbox, *range(1, 11), key=None)
    async with serving(view):
        await await_until(lambda: len(effects(outbox)) == 9, what="the others")
        await await_until(lambda: dead(outbox) == [(7, "HandlerFailed", 2)], what="the culprit")
    assert effects(outbox) == [1, 2, 3, 4, 5, 6, 8, 9, 10]


async def test_a_lost_connection_and_a_deadlock_cost_no_attempt(outbox: Database) -> None:
    """Covers C5."""
    view = consumer(outbox, partitions=1)
    attempts: list[int] = []

    @view.on("order.*")
    async def project(order: Order, event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
        attempts.append(event.attempt)
        await tx.execute(INSERT, [order.number])
        if len(attempts) == 1:
            outbox.execute(f"select pg_terminate_backend({tx.info.backend_pid})")
            await tx.execute("select 1")
        if len(attempts) == 2:
            raise psycopg.errors.DeadlockDetected("as the server says it")

    await asyncio.to_thread(write, outbox, 1)
    async with serving(view):
        await await_until(lambda: effects(outbox) == [1], what="the effect")
    assert attempts == [1, 1, 1]
    assert outbox.execute("select count(*) from mailboat.refusals") == [(0,)]


async def test_delivery_behind_a_pooler_in_transaction_mode(
    outbox: Database, tmp_path: Path, or_skip: Callable[[Callable[[], PgBouncer]], PgBouncer]
) -> None:
    """In transaction mode there is no LISTEN and no prepared statement. Polling finds events after an idle phase."""
    with or_skip(lambda: start_pgbouncer(tmp_path / "bouncer", outbox.server)) as bouncer:
        view = Consumer("shop/view", url=bouncer.url(outbox.name), spec={"delivery": NO_WAIT}, pace=QUICK)
        attempts: list[int] = []

        @view.on("order.*")
        async def project(order: Order, event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
            await tx.execute(INSERT, [order.number])
            if order.number == 5:
                attempts.append(event.attempt)
                if len(attempts) < 3:
                    raise ValueError("twice")

        async with serving(view):
            await asyncio.to_thread(write, outbox, *range(1, 41))
            await await_until(lambda: len(effects(outbox)) == 40, what="all effects")
            await asyncio.to_thread(write, outbox, 41)
            await await_until(lambda: len(effects(outbox)) == 41, what="the last effect")
    assert effects(outbox) == list(range(1, 42))
    assert attempts == [1, 2, 3]


@pytest.mark.verify
async def test_a_database_that_crashes_is_waited_for_and_costs_no_attempt(tmp_path: Path) -> None:
    """C1, C3, C5 with a crash of the server."""
    with PostgresServer.start(find_postgres(NEWEST), tmp_path / "server") as server:
        server.create_database("shop")
        outbox = Database(server, "shop")
        mailboat.migrate(outbox.url)
        outbox.execute("create table effects (ordinal bigserial, number int, handler text)")
        view, attempts = consumer(outbox, delivery={"batchSize": 5}), set[int]()

        @view.on("order.*")
        async def project(order: Order, event: Event, tx: psycopg.AsyncConnection[Any]) -> None:
            attempts.add(event.attempt)
            await tx.execute(INSERT, [order.number])
            await asyncio.sleep(0.005)  # load: the crash must happen while a batch is in flight

        async with serving(view):
            await asyncio.to_thread(write, outbox, *range(1, 201))
            await await_until(lambda: len(effects(outbox)) > 40, what="some effects")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.launch)
            await await_until(lambda: len(effects(outbox)) == 200, timeout=90, what="all effects")
        assert effects(outbox) == list(range(1, 201))
        assert attempts == {1}


async def test_a_database_unavailable_at_start_is_awaited(outbox: Database, tmp_path: Path) -> None:
    """Manifests and secrets are read again for each attempt, so a corrected URL needs no restart."""
    path, port = tmp_path / "manifests.yaml", free_port()

    def write_manifests(url: str) -> None:
        path.write_text(yaml.safe_dump_all((outbox_relay_on(url), event_subscription("view", {"pull": {}}))))

    async def is_connecting() -> bool:
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                (report,) = (await (await http.get("/status")).json())["consumers"]
        except aiohttp.ClientConnectionError:
            return False
        return (report["state"], "refused" in report["message"]) == ("Connecting", True)

    write_manifests(f"postgresql://nobody@127.0.0.1:{free_port()}/nowhere")
    view = Consumer("shop/view", manifests=path, pace=QUICK, listen=f"127.0.0.1:{port}")
    view.on("order.*")(with_async_psycopg)
    async with serving(view):
        await await_until(is_connecting, what="the status with its reason")
        write(outbox, 1)
        write_manifests(outbox.url)
        await await_until(lambda: effects(outbox) == [1], what="the effect")


async def test_instances_share_the_work_and_report_themselves(outbox: Database) -> None:
    # The manifests name the outbox, so a subscription of the same name in another outbox does not matter.
    outbox.execute("select mailboat.create_outbox('shop.returns')")
    outbox.execute(
        "insert into mailboat.subscriptions (outbox, name, partitions) values ('shop.returns', 'shop/view', 1)"
    )
    delivery = {"maxAttempts": 2, **NO_WAIT}
    manifests = (outbox_relay_on(outbox.url), event_subscription("view", {"pull": {}}, delivery=delivery))
    path = outbox.server.directory / f"{outbox.name}.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    outbox.execute(
        "create table mailboat.outbox_p20200101 partition of mailboat.outbox"
        " for values from ('2020-01-01') to ('2020-01-02')"
    )
    port = free_port()
    views = [
        Consumer("view", manifests=path, pace=QUICK, instance="one", listen=f"127.0.0.1:{port}"),
        Consumer("shop/view", manifests=str(path), pace=QUICK, instance="two"),
    ]
    for view in views:

        @view.on("order.placed")
        async def project(order: dict[str, Any], tx: psycopg.AsyncConnection[Any]) -> None:
            await tx.execute(INSERT, [order["number"]])
            if order["number"] == 13:
                raise ValueError(13)

    async with serving(*views):
        await asyncio.to_thread(write, outbox, *range(1, 101), key=None)
        await await_until(lambda: len(effects(outbox)) == 99, what="all effects")
        await await_until(lambda: dead(outbox), what="the dead letter")
        assert dead(outbox) == [(13, "HandlerFailed", 2)]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/readyz")).status == (await http.get("/livez")).status == 200
            (report,) = (await (await http.get("/status")).json())["consumers"]
            metrics = await (await http.get("/metrics")).text()
        assert (report["name"], report["instance"], report["state"]) == ("shop/view", "one", "Running")
        assert 'mailboat_consumer_handled_total{consumer="shop/view"}' in metrics
        instances = outbox.execute("select instance from mailboat.consumers order by 1")
        assert instances == [("one",), ("two",)]
        old = "select count(*) from pg_class where relname = 'outbox_p20200101'"
        await await_until(lambda: outbox.execute(old) == [(0,)], what="the expired time partition to be dropped")
    assert sorted(effects(outbox)) == [n for n in range(1, 101) if n != 13]
    assert outbox.execute("select count(*) from mailboat.consumers") == [(0,)]


async def test_without_rights_or_a_declaration_the_error_names_the_remedy(outbox: Database) -> None:
    unknown = Consumer("shop/unknown", url=outbox.url)
    unknown.on("*")(with_psycopg)
    with pytest.raises(ConfigError, match=r"there is no subscription shop/unknown\. Declare it: mailboat migrate -f"):
        await unknown.serve()
    with pytest.raises(ConfigError, match="has no handlers"):
        await Consumer("shop/view", url=outbox.url).serve()
    nowhere = Consumer("shop/view")
    nowhere.on("*")(with_psycopg)
    with pytest.raises(ConfigError, match="where are its events"):
        await nowhere.serve()
