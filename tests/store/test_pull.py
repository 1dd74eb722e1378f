"""`mailboat.pull`, `refuse` and `once`: the SQL interface for consumers in any language (C1 to C8)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from mailboat.errors import ConfigError
from mailboat_devservers.postgres import Database
from support.databases import migrated_database
from support.inprocess_relay import serving, status_of
from support.pull_consumers import NAME, Puller, declare, emit
from support.relay_processes import outbox_relay
from support.relay_processes import subscription as relay_subscription
from support.renamed_table import RENAMED, make_renamed
from support.wait import await_until, wait_until

REPEATABLE_READ = psycopg.IsolationLevel.REPEATABLE_READ
MakePuller = Callable[..., Puller]


@pytest.fixture(params=["postgres", pytest.param("postgres14", marks=pytest.mark.verify)])
def outbox(request: pytest.FixtureRequest) -> Iterator[Database]:
    yield from migrated_database(request.getfixturevalue(request.param))


@pytest.fixture
def puller(outbox: Database) -> Iterator[MakePuller]:
    """Factory of consumers: each call of ``puller()`` makes another one."""
    made: list[Puller] = []

    def make(isolation: psycopg.IsolationLevel | None = None, url: str | None = None) -> Puller:
        made.append(Puller(url or outbox.url, isolation))
        return made[-1]

    yield make
    for each in made:
        each.close()


def dead_letters(outbox: Database) -> list[tuple[str, int, str]]:
    rows = outbox.execute(
        "select convert_from(payload, 'UTF8'), attempts, reason from mailboat.dead_letters order by dead_id"
    )
    return [(payload, attempts, reason) for payload, attempts, reason in rows]


# ---- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", [None, REPEATABLE_READ], ids=["read committed", "repeatable read"])
def test_effects_and_progress_commit_together_or_not_at_all(
    outbox: Database, puller: MakePuller, isolation: psycopg.IsolationLevel | None
) -> None:
    declare(outbox)
    emit(outbox, "a-1", "b-1", "a-2")
    consumer = puller(isolation)
    pulled_after = time.monotonic()
    assert consumer.ids() == ["a-1", "b-1", "a-2"]
    consumer.connection.rollback()
    early = consumer.take(2)
    assert (
        not early or time.monotonic() - pulled_after > 0.8
    )  # withheld for a second, in which the consumer may refuse one
    again = early or wait_until(lambda: consumer.take(2), what="the events to come again")
    assert again == ["a-1"]  # one at a time, since a consumer did not return with the batch
    assert consumer.ids() == ["b-1"]
    consumer.vanish()
    consumer = puller(isolation)
    assert wait_until(consumer.take, what="the next one") == ["b-1"]
    assert consumer.take_all() == ["a-2"]
    emit(outbox, "a-3")
    assert consumer.take_all() == ["a-3"]


def test_a_large_window_is_walked_and_late_events_come_once(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, partitions=4)
    consumer, late = puller(), psycopg.connect(outbox.url)
    late.execute("insert into mailboat.outbox (event_type, key, payload) values ('x', 'k', 'late')")
    emit(outbox, "a-1")
    assert consumer.take_all() == ["a-1"]  # the snapshots of the cursors list the late transaction as in progress
    outbox.execute(
        "insert into mailboat.outbox (event_type, key, payload)"
        " select 'x', 'k' || n % 7, n::text::bytea from generate_series(1, 5000) n"
    )
    late.commit()
    late.close()
    got = consumer.take_all(300)
    assert sorted(got) == sorted([*map(str, range(1, 5001)), "late"])
    for key in range(7):
        of_key = [int(each) for each in got if each != "late" and int(each) % 7 == key]
        assert of_key == sorted(of_key)
    ((closed,),) = outbox.execute("select bool_and(window_snapshot is null) from mailboat.cursors")
    assert closed


def test_large_payloads_are_pulled_a_few_at_a_time(outbox: Database, puller: MakePuller) -> None:
    declare(outbox)
    outbox.execute(
        "insert into mailboat.outbox (event_type, key, payload)"
        " select 'x', 'k', convert_to(repeat(n::text, 12000000), 'UTF8') from generate_series(1, 7) n"
    )
    consumer = puller()
    taken = [[each[0] for each in consumer.take()] for _ in range(4)]
    assert taken == [["1", "2", "3"], ["4", "5", "6"], ["7"], []]


def test_consumers_share_partitions_and_a_key_has_one_consumer_at_a_time(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, partitions=8)
    emit(outbox, *(f"k{n}-1" for n in range(20)))
    first, second = puller(), puller(REPEATABLE_READ)
    in_first, in_second = first.pull(), second.pull()
    assert in_first
    assert in_second
    assert {each.partition for each in in_first}.isdisjoint({each.partition for each in in_second})
    emit(outbox, *(f"{each.key}-2" for each in in_first))
    third = puller().take_all()
    assert not {each.partition("-")[0] for each in third} & {each.key for each in in_first}


def test_filters_and_the_start_are_applied(outbox: Database, puller: MakePuller) -> None:
    emit(outbox, "old-1")
    declare(
        outbox,
        partitions=2,
        start={"from": "Latest"},
        filter={"eventTypes": ["order.*", "100%"], "tags": {"allOf": ["eu"], "noneOf": ["test"]}},
    )
    emit(outbox, "a-1", type="order.placed", tags=["eu"])
    emit(outbox, "a-2", type="order.placed", tags=["eu", "test"])
    emit(outbox, "a-3", type="other", tags=["eu"])
    emit(outbox, "a-4", type="100%", tags=["eu", "x"])
    emit(outbox, "a-5", type="1000", tags=["eu"])
    assert puller().take_all() == ["a-1", "a-4"]


def test_a_pull_skips_events_of_others_and_an_idle_pull_writes_nothing(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, partitions=2, filter={"eventTypes": ["wanted"]})
    emit(outbox, "a-1")
    consumer = puller()
    before = outbox.execute("select settled_snapshot::text from mailboat.cursors")
    assert consumer.take() == []
    moved = outbox.execute("select settled_snapshot::text from mailboat.cursors")
    assert moved != before
    versions = outbox.execute("select ctid::text from mailboat.cursors order by partition")
    assert consumer.take() == []
    assert outbox.execute("select ctid::text from mailboat.cursors order by partition") == versions


def test_nothing_comes_while_paused_and_a_change_of_partitions_loses_and_doubles_nothing(
    outbox: Database, puller: MakePuller
) -> None:
    declare(outbox, partitions=2)
    events = [f"k{n % 9}-{n}" for n in range(60)]
    emit(outbox, *events)
    consumer = puller()
    got = consumer.take(10)
    held = consumer.pull(5)
    consumer.refuse(held[0], retry_in="1 hour")
    outbox.execute("update mailboat.subscriptions set state = 'Paused'")
    assert consumer.take() == []
    outbox.execute("update mailboat.subscriptions set state = 'Running'")
    declare(outbox, partitions=5)
    outbox.execute("update mailboat.parked set next_attempt_at = clock_timestamp() where next_attempt_at is not null")
    got += consumer.take_all(7)
    outbox.execute("update mailboat.parked set next_attempt_at = clock_timestamp() where next_attempt_at is not null")
    got += consumer.take_all(7)
    assert sorted(got) == sorted(events)
    for key in range(9):
        numbers = [int(each.partition("-")[2]) for each in got if each.startswith(f"k{key}-")]
        assert numbers == sorted(numbers)


def test_a_table_with_columns_of_other_names_is_pulled_too(outbox: Database, puller: MakePuller) -> None:
    make_renamed(outbox)
    with pytest.raises(ConfigError, match=r"emitDeadLetters needs an outbox with Mailboat's own columns"):
        declare(outbox, RENAMED, sink={"pull": {"emitDeadLetters": True}})
    declare(outbox, RENAMED)
    outbox.execute(f"insert into {RENAMED.table} ({RENAMED.columns['event_type']}, payload) values ('x', 'one')")
    assert puller().take_all() == ["one"]
    outbox.execute(f"alter table {RENAMED.table} owner to mailboat_writer")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="is owned by mailboat_writer, and is pulled with"):
        puller().pull()


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_refused_event_holds_its_key_only_and_dies_after_its_attempts(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, delivery={"maxAttempts": 3})
    emit(outbox, "a-1", "a-2", "b-1", "a-3", "c-1")
    consumer = puller()
    poison = consumer.pull()[1]
    assert consumer.refuse(poison, "no such wallet") == "Noted"
    got = consumer.take()
    assert got == ["a-1", "b-1", "c-1"]
    emit(outbox, "a-4", "b-2")
    outcomes: list[str] = []
    while not outcomes or outcomes[-1] == "Parked":
        batch = wait_until(consumer.pull, what="the next attempt")
        if batch[0].event_id != poison.event_id:
            got += [bytes(each.payload).decode() for each in batch]
            consumer.connection.commit()
            continue
        assert [each.attempt for each in batch] == [2 + len(outcomes)]  # alone: later events of the key are not tried
        outcomes.append(consumer.refuse(batch[0], "still not"))
    assert outcomes == ["Parked", "DeadLettered"]
    assert dead_letters(outbox) == [("a-2", 3, "HandlerFailed")]
    got += consumer.take_all()
    assert [each for each in got if each[0] == "a"] == ["a-1", "a-3", "a-4"]
    assert sorted(got) == ["a-1", "a-3", "a-4", "b-1", "b-2", "c-1"]


def test_final_later_and_uncounted_refusals(outbox: Database, puller: MakePuller) -> None:
    declare(outbox)
    emit(outbox, "a-1", "b-1", "c-1")
    consumer = puller()
    a, b, c = consumer.pull()
    consumer.refuse(a, "never", final=True, reason="Refused")
    consumer.refuse(b, "bank closed", retry_in="1 hour", counted=False)
    consumer.refuse(c, "shutting down", counted=False)
    assert consumer.take_all() == ["c-1"]
    assert dead_letters(outbox) == [("a-1", 1, "Refused")]
    assert outbox.execute("select attempts, next_attempt_at > now() + interval '50 min' from mailboat.parked") == [
        (0, True)
    ]
    outbox.execute("update mailboat.parked set next_attempt_at = now()")
    assert [each.attempt for each in consumer.pull()] == [1]


def test_a_blocked_key_waits_for_a_person(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, delivery={"maxAttempts": 1, "onExhausted": "Block"})
    emit(outbox, "a-1", "a-2", "b-1")
    consumer = puller()
    consumer.refuse(consumer.pull()[0])
    assert consumer.take_all() == ["b-1"]
    outbox.execute("update mailboat.parked set blocked = false, attempts = 0, next_attempt_at = now() where blocked")
    assert consumer.take_all() == ["a-1", "a-2"]


def test_without_order_a_refused_event_holds_nothing_up(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, ordering="None")
    emit(outbox, "a-1", "a-2")
    consumer = puller()
    consumer.refuse(consumer.pull()[0], retry_in="1 hour")
    assert consumer.take_all() == ["a-2"]


def test_a_refusal_in_the_transaction_of_the_pull_is_an_error(outbox: Database, puller: MakePuller) -> None:
    declare(outbox)
    emit(outbox, "a-1")
    consumer = puller()
    (event,) = consumer.pull()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="roll it back first"):
        consumer.run("select mailboat.refuse(%s, %s, 'no')", NAME, event.event_id)


def test_an_event_that_kills_its_consumers_is_found(outbox: Database, puller: MakePuller) -> None:
    """A crash is a rollback. Only the journal records it (reason ConsumerDied)."""
    declare(outbox, delivery={"maxAttempts": 3})
    emit(outbox, "a-1", "b-1", "lethal-1", "c-1", "lethal-2", "a-2")
    got: list[str] = []
    consumer = puller()

    def all_but_one() -> bool:
        nonlocal consumer
        batch = consumer.ids()
        if "lethal-1" in batch:
            consumer.vanish()
            consumer = puller()
            return False
        got.extend(batch)
        consumer.connection.commit()
        return len(got) == 5

    wait_until(all_but_one, what="the others to be handled")
    assert dead_letters(outbox) == [("lethal-1", 3, "ConsumerDied")]
    assert got == ["a-1", "b-1", "c-1", "lethal-2", "a-2"]


def test_a_parked_event_that_kills_its_consumers_is_found_too(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, delivery={"maxAttempts": 3})
    emit(outbox, "a-1", "a-2")
    consumer = puller()
    consumer.refuse(consumer.pull()[0])
    consumer.take()  # parks the event
    for _ in range(2):
        consumer = puller()
        assert wait_until(consumer.ids, what="the next attempt") == ["a-1"]
        consumer.vanish()
    consumer = puller()
    assert wait_until(consumer.take, what="its successor") == ["a-2"]
    assert dead_letters(outbox) == [("a-1", 3, "ConsumerDied")]


def test_dead_letters_are_emitted_once_with_the_refusal_and_without_a_loop(
    outbox: Database, puller: MakePuller
) -> None:
    """Guarantee C8: the document contains the event, and another subscription can deliver it."""
    emits = {"pull": {"emitDeadLetters": True}}
    declare(outbox, sink=emits, delivery={"maxAttempts": 1})
    declare(outbox, name="alarm", sink=emits, filter={"eventTypes": ["mailboat.*"]}, delivery={"maxAttempts": 1})
    payloads = {"a": b'{"n": 1.50}', "b": b"\x00\xff", "c": b'"' + b"x" * 600_000 + b'"', "d": b"\xff{", "e": None}
    with psycopg.connect(outbox.url) as connection:
        for key, payload in payloads.items():
            connection.execute(
                "insert into mailboat.outbox (event_type, key, payload, content_type) values ('x', %s, %s, %s)",
                (key, payload, "image/png" if key == "b" else "application/json"),
            )
    consumer = puller()
    for event in (batch := consumer.pull()):
        consumer.refuse(event, "no " + "\u20ac" * 20_000, reason="Because " + "x" * 10_000)
    emitted = "select count(*) from mailboat.outbox where event_type = 'mailboat.dead-letter'"
    assert consumer.pull() == []  # parks them and records them as dead letters
    consumer.connection.rollback()
    assert outbox.execute(emitted) == [(0,)]
    assert consumer.take_all() == []  # the consumer does not receive its own dead letters
    alarm = puller()
    alarm.name = "shop/alarm"
    letters = alarm.pull()
    assert [(each.event_type, each.key) for each in letters] == [("mailboat.dead-letter", key) for key in payloads]
    documents = [json.loads(each.payload) for each in letters]
    assert {(each["reason"], each["attempts"], each["consumer"]) for each in documents} == {
        ("Because " + "x" * 120, 1, NAME)
    }
    assert all(len(each["error"]) == 16_384 for each in documents)
    originals = [each["originalEvent"] for each in documents]
    assert [each["id"] for each in originals] == [str(each.event_id) for each in batch]
    assert [each["payload"] for each in originals] == [{"n": 1.5}, None, None, None, None]
    assert b'"payload" : {"n": 1.50}' in letters[0].payload
    assert [each["payloadBase64"] for each in originals] == [None, "AP8=", None, "/3s=", None]
    assert [each["payloadBytes"] for each in originals] == [11, 2, 600_002, 2, None]
    assert letters[0].tags == [f"dead-letter-of={NAME}", "reason=Because " + "x" * 120]
    for each in letters:
        alarm.refuse(each)
    assert alarm.take_all() == []
    assert outbox.execute("select count(*) from mailboat.dead_letters") == [(10,)]
    assert outbox.execute(emitted) == [(5,)]


# ---- groups -------------------------------------------------------------------------------------------------------

BY_USER = {"groupBy": ["tenant", "user"], "batchSize": 100}


def test_a_group_is_never_cut_and_fails_as_a_whole(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, delivery={**BY_USER, "maxAttempts": 2})
    group = [f"u-{n}" for n in range(120)]
    emit(outbox, *group, headers={"tenant": "acme"}, tags=["user=1"])
    emit(outbox, "v-1", headers={"tenant": "acme"}, tags=["user=2"])
    consumer = puller()
    batch = consumer.pull()
    assert [bytes(each.payload).decode() for each in batch] == group
    consumer.refuse(batch[-1], "the last one fails")
    assert consumer.take() == ["v-1"]
    again = wait_until(consumer.pull, what="the group's next attempt")
    assert [bytes(each.payload).decode() for each in again] == group
    assert {each.attempt for each in again} == {2}
    assert consumer.refuse(again[-1], "again") == "DeadLettered"
    assert [payload for payload, _, _ in dead_letters(outbox)] == group


def test_the_events_of_a_transaction_come_together_whatever_lies_between(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, delivery={"groupBy": ["transaction"], "batchSize": 2})
    with psycopg.connect(outbox.url) as one, psycopg.connect(outbox.url) as two:
        for n in range(4):
            one.execute("insert into mailboat.outbox (event_type, payload) values ('x', %s)", (f"one-{n}".encode(),))
            two.execute("insert into mailboat.outbox (event_type, payload) values ('x', %s)", (f"two-{n}".encode(),))
    emit(outbox, "three-1", "three-2", "three-3")
    consumer = puller()
    assert sorted(consumer.take()) == sorted(f"{who}-{n}" for who in ("one", "two") for n in range(4))
    assert consumer.take() == ["three-1", "three-2", "three-3"]


def test_a_group_beyond_the_limit_fails_loudly(outbox: Database, puller: MakePuller) -> None:
    declare(outbox, delivery={**BY_USER, "batchSize": 2, "maxGroup": 5})
    emit(outbox, *(f"u-{n}" for n in range(6)), tags=["user=1"])
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="more than 5 events"):
        puller().pull()


# ---- once, waking, rights -----------------------------------------------------------------------------------------


def test_once_returns_whether_an_event_is_new_in_the_callers_transaction(outbox: Database, puller: MakePuller) -> None:
    event = "00000000-0000-0000-0000-000000000001"
    one, two = puller(), puller()

    def once(consumer: Puller) -> bool:
        ((is_new,),) = consumer.run("select mailboat.once('billing', %s)", event)
        return bool(is_new)

    assert once(one)
    one.connection.rollback()
    assert once(one)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(once(two)))  # waits until the first transaction ends
    waiting.start()
    one.connection.commit()
    waiting.join()
    assert answers == [False]
    two.connection.commit()
    assert one.run("select mailboat.forget('billing', %s)", event) == [(True,)]
    assert once(one)


def test_writers_notify_while_a_consumer_is_idle(outbox: Database, puller: MakePuller) -> None:
    declare(outbox)
    consumer = puller()
    consumer.connection.autocommit = True
    consumer.run("select mailboat.heartbeat(%s, 'one', '1 minute')", NAME)
    consumer.connection.execute("listen mailboat")
    emit(outbox, "a-1")
    assert [each.payload for each in consumer.connection.notifies(timeout=30, stop_after=1)] == ["mailboat.outbox"]
    consumer.run("select mailboat.leave(%s, 'one')", NAME)
    assert outbox.execute("select count(*) from mailboat.consumers") == [(0,)]


def test_a_consumer_may_pull_granted_subscriptions_only(outbox: Database, puller: MakePuller) -> None:
    declare(outbox)
    emit(outbox, "a-1")
    role = f"app_{outbox.name}"
    outbox.execute(f"create role {role} login in role mailboat_consumer")
    try:
        consumer = puller(url=outbox.url_for(role))
        for forbidden in (
            "select * from mailboat.pull('shop/view')",
            "select mailboat.refuse('shop/view', gen_random_uuid(), 'no')",
            "select mailboat.once('billing', gen_random_uuid())",
            "select * from mailboat.outbox",
            "select * from mailboat.cursors",
            "select mailboat.grant_consumer('shop/view', current_user)",
            "select mailboat.give_up(s, p, 0, '{}') from mailboat.subscriptions s, mailboat.pull_policies p",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                consumer.connection.execute(forbidden)
            consumer.connection.rollback()
        outbox.execute(f"select mailboat.grant_consumer('shop/view', '{role}')")
        consumer.connection.execute("create temporary table cursors (x int)")
        consumer.connection.execute("set search_path = pg_temp, pg_catalog")
        (event,) = consumer.pull()
        consumer.refuse(event, retry_in="0")
        assert consumer.take() + consumer.take() == ["a-1"]
        assert consumer.run("select pending, parked, dead from mailboat.pull_lag('shop/view')") == [(0, 0, 0)]
        consumer.close()
    finally:
        outbox.execute(f"drop owned by {role}; drop role {role}")


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("select * from mailboat.pull('shop/none')", "there is no subscription shop/none"),
        ("select * from mailboat.pull('shop/view', 0)", "between 1 and 10000"),
        ("select * from mailboat.pull('shop/relayed')", "delivered by relays, not pulled"),
    ],
)
def test_wrong_calls_of_the_pull_functions_are_refused(
    outbox: Database, puller: MakePuller, statement: str, complaint: str
) -> None:
    declare(outbox)
    outbox.execute(
        "insert into mailboat.subscriptions (outbox, name, partitions) values ('mailboat.outbox', 'shop/relayed', 1)"
    )
    with pytest.raises(psycopg.Error, match=complaint):
        puller().connection.execute(statement)


def test_journals_and_readers_go_with_their_subscription(outbox: Database) -> None:
    made = (
        "select (select count(*) from pg_class where relname like 'journal_%' and relkind = 'S'),"
        " (select count(*) from pg_proc where pronamespace = 'mailboat'::regnamespace and proname ~ '_[0-9]+$'"
        "  and not has_function_privilege('mailboat_consumer', oid, 'execute'))"
    )
    declare(outbox, partitions=3)
    assert outbox.execute(made) == [(6, 3)]
    outbox.execute("delete from mailboat.subscriptions")
    assert outbox.execute(made) == [(0, 0)]


def test_a_connection_that_stays_follows_a_change_of_the_filter_and_of_the_table(
    outbox: Database, puller: MakePuller
) -> None:
    """A session keeps the plans of the readers longer than the filter and the table for which they were made."""
    declare(outbox, filter={"eventTypes": ["a.*"]}, partitions=2)
    consumer = puller()
    for turn in range(3):  # so that each plan was used
        emit(outbox, f"k-{turn}", type="a.x")
        assert consumer.take_all() == [f"k-{turn}"]
    declare(outbox, filter={"eventTypes": ["b.*"]}, partitions=3, delivery={"groupBy": ["tenant"]})
    outbox.execute(
        "create table mailboat.of_old partition of mailboat.outbox for values from (minvalue) to ('2001-01-01Z');"
        "insert into mailboat.outbox (event_type, payload, created_at, headers)"
        " values ('a.x', 'no', '2000-01-01Z', null), ('b.x', 'old', '2000-01-01Z', '{\"tenant\": \"t\"}')"
    )
    emit(outbox, "k-9", type="b.y")
    got: set[tuple[bytes, str | None]] = set()
    while batch := consumer.pull():
        got |= {(bytes(each.payload), each.group_label) for each in batch}
        consumer.connection.commit()
    assert got == {(b"old", "t"), (b"k-9", None)}


# ---- relays -------------------------------------------------------------------------------------------------------


async def test_one_relay_reports_the_lag_and_none_delivers(outbox: Database) -> None:
    """Guarantee C10: relays declare pull subscriptions and leave their partitions to consumers."""
    manifests = outbox_relay(outbox.url), relay_subscription("view", {"pull": {}}, partitions=2)
    emit(outbox, "a-1", "b-1", "c-1")
    async with serving(*manifests, relay="one") as one, serving(*manifests, relay="two") as two:
        await await_until(lambda: status_of(one, "view").lag == 3, what="relay one to report the lag")
        assert (status_of(two, "view").lag, status_of(two, "view").owned) == (0, ())
        consumer = Puller(outbox.url, name="faults/view")
        taken = await asyncio.to_thread(consumer.take_all)
        consumer.close()
        assert sorted(taken) == ["a-1", "b-1", "c-1"]
        await await_until(lambda: status_of(one, "view").lag == 0, what="relay one to report no lag")
        assert [each.partition for each in status_of(one, "view").owned] == [0, 1]
        assert await one.assign("faults/view", 1, {0: "two"})
    written = "select count(*) from mailboat.cursors where epoch is not null or assigned_to is not null"
    assert outbox.execute(written) == [(0,)]
