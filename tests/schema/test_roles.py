"""Least privilege: a writer can only emit; a relay can only read events and store its progress."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from mailboat import emit
from mailboat.store.admin.overview import forget
from mailboat.store.connection import PostgresConnection
from mailboat.store.schema.verify import verify
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from support.databases import logged_in
from support.renamed_table import make_renamed
from support.store_backends import PostgresWorld, subscription
from support.store_relays import Relay, write


@pytest.fixture
def as_writer(outbox: Database) -> Iterator[str]:
    with logged_in(outbox, "mailboat_writer") as url:
        yield url


@pytest.fixture
def as_relay(outbox: Database) -> Iterator[str]:
    with logged_in(outbox, "mailboat_relay") as url:
        yield url


def test_a_writer_emits_in_every_way(outbox: Database, as_writer: str) -> None:
    outbox.execute(
        "insert into mailboat.relays (id, incarnation, outbox, session_lock, beat_at, expires_at)"
        " values ('r', gen_random_uuid(), 'mailboat.outbox', true, now(), 'infinity')"
    )
    outbox.execute("insert into mailboat.wakeup_requests values ('r', 'mailboat.outbox', true)")
    with psycopg.connect(as_writer) as connection:
        emit(connection, "python", {"n": 1}, key="k")
        connection.execute("select mailboat.emit('sql', '{}'::jsonb, key => 'k')")
        connection.execute("select mailboat.emit('with all checks', '{}'::jsonb, key => 'k', tags => '{eu}')")
        connection.execute("""select mailboat.emit_many('[{"event_type": "many", "key": "k"}]')""")
        connection.execute("insert into mailboat.outbox (event_type, key, payload) values ('by hand', 'k', '{}')")
        with connection.cursor().copy("copy mailboat.outbox (event_type, key) from stdin") as copy:
            copy.write_row(("copied", "k"))
    types = outbox.execute("select event_type from mailboat.outbox order by id")
    assert types == [("python",), ("sql",), ("with all checks",), ("many",), ("by hand",), ("copied",)]


_REFUSED = {
    "mailboat_writer": [
        "select * from mailboat.outbox",
        "insert into mailboat.outbox (id, event_type) values (1, 'x')",
        "insert into mailboat.outbox (xid, event_type) values ('1', 'x')",
        "insert into mailboat.outbox (created_at, event_type) values (now(), 'x')",
        "insert into mailboat.outbox (event_type) values ('x') returning id",
        "update mailboat.outbox set payload = null",
        "delete from mailboat.outbox",
        "truncate mailboat.outbox",
        "select setval('mailboat.outbox_id_seq', 1)",
        "select * from mailboat.cursors",
        "select * from mailboat.dead_letters",
        "insert into mailboat.wakeup_requests values ('me', 'mailboat.outbox', true)",
        "select mailboat.ensure_partitions('mailboat.outbox')",
        "select mailboat.create_outbox('mailboat.mine')",
        "select mailboat.grant_roles()",
        "select mailboat.set_roles('mailboat.outbox', writer => 'postgres')",
    ],
    "mailboat_relay": [
        "insert into mailboat.outbox (event_type) values ('forged')",
        "select mailboat.emit('forged', '{}'::jsonb)",
        "delete from mailboat.outbox",
        "insert into mailboat.outboxes (name) values ('pg_catalog.pg_class')",
        "delete from mailboat.migrations",
        "select mailboat.create_outbox('mailboat.mine')",
    ],
}


@pytest.mark.parametrize(("role", "statement"), [(role, each) for role in _REFUSED for each in _REFUSED[role]])
def test_a_role_may_do_nothing_else(shared_outbox: Database, role: str, statement: str) -> None:
    with (
        logged_in(shared_outbox, role) as url,
        psycopg.connect(url) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement)


def test_a_relay_reads_keeps_progress_and_supplies_partitions(outbox: Database, as_relay: str) -> None:
    outbox.execute("select mailboat.emit('x', '{}'::jsonb)")
    with psycopg.connect(as_relay) as connection:
        assert connection.execute("select event_type from mailboat.outbox").fetchall() == [("x",)]
        connection.execute(
            "insert into mailboat.subscriptions (outbox, name, partitions) values ('mailboat.outbox', 'a/b', 1)"
        )
        connection.execute("insert into mailboat.wakeup_requests values ('r', 'mailboat.outbox', true)")
        connection.execute("update mailboat.wakeup_requests set active = false")
        connection.execute("delete from mailboat.wakeup_requests")
        assert connection.execute("select mailboat.ensure_partitions('mailboat.outbox', '32 days')").fetchone() == (2,)


def test_partitions_made_later_and_outboxes_made_later_work_for_both(
    outbox: Database, as_writer: str, as_relay: str
) -> None:
    outbox.execute("select mailboat.create_outbox('shop.events')")
    outbox.execute("drop table mailboat.outbox_p" + _today(outbox))
    outbox.execute("drop table shop.events_p" + _today(outbox))
    with psycopg.connect(as_relay) as connection:
        for name in ("mailboat.outbox", "shop.events"):
            assert connection.execute("select mailboat.ensure_partitions(%s)", (name,)).fetchone() == (1,)
    with psycopg.connect(as_writer) as connection:
        for name in ("mailboat.outbox", "shop.events"):
            emit(connection, "x", {}, outbox=name)
    with psycopg.connect(as_relay) as connection:
        for name in ("mailboat.outbox", "shop.events"):
            assert connection.execute(f"select event_type from {name}").fetchall() == [("x",)]


def test_no_function_looks_up_names_in_its_callers_path(shared_outbox: Database) -> None:
    """Each function sets its own path, has a body bound at its creation, or runs in every insert (next test)."""
    assert not shared_outbox.execute(
        "select oid::regprocedure::text from pg_proc where pronamespace = 'mailboat'::regnamespace"
        " and prosqlbody is null and 'search_path=pg_catalog, pg_temp' <> all (coalesce(proconfig, '{}'))"
        " and proname not in ('check_event', 'emit_bytes', 'key_slot', 'notify_on_insert')"
    )


_TRAPS = """
create schema traps;
grant usage on schema traps to public;
do $do$
declare
    body constant text := 'begin raise exception ''trapped''; end';
    trap record;
begin
    for trap in
        select p.proname as name, pg_get_function_identity_arguments(p.oid) as arguments,
               pg_get_function_result(p.oid) as result
        from pg_proc p
        where p.pronamespace = 'pg_catalog'::regnamespace and p.proname in (
            'replace', 'sha256', 'substr', 'encode', 'octet_length', 'jsonb_typeof', 'cardinality', 'to_regclass',
            'pg_sequence_last_value', 'date_part', 'clock_timestamp')
    loop
        execute format('create function traps.%I(%s) returns %s language plpgsql as %L',
                       trap.name, trap.arguments, trap.result, body);
    end loop;
    for trap in
        select o.oid, o.oprname as name, o.oprleft::regtype as l, o.oprright::regtype as r,
               o.oprresult::regtype as result
        from pg_operator o
        where o.oprnamespace = 'pg_catalog'::regnamespace
          and o.oprname in ('%', '||', '&', '>', '<=', '<>', '=', '*', '~', '!~')
          and o.oprleft::regtype::text in ('text', 'integer', 'bigint', 'double precision')
          and o.oprright::regtype::text in ('text', 'integer', 'bigint', 'double precision')
    loop
        execute format('create function traps.trap_%s(%s, %s) returns %s language plpgsql as %L',
                       trap.oid, trap.l, trap.r, trap.result, body);
        execute format('create operator traps.%s (leftarg = %s, rightarg = %s, function = traps.trap_%s)',
                       trap.name, trap.l, trap.r, trap.oid);
    end loop;
end
$do$;
"""


def test_an_insert_calls_nothing_of_its_writers_path(outbox: Database, as_writer: str) -> None:
    outbox.execute(_TRAPS)
    with psycopg.connect(as_writer) as connection:
        connection.execute("set search_path = traps, pg_catalog")
        with pytest.raises(psycopg.errors.RaiseException, match="trapped"), connection.transaction():
            connection.execute("select 'a'::text || 'b'::text")
        connection.execute(
            "insert into mailboat.outbox (event_type, key, headers, tags)"
            " values ('x', 'k', jsonb_build_object('a', 'b'), '{t}'), ('x', null, null, '{}')"
        )
        connection.execute("select mailboat.emit('x', '{}'::jsonb, key => 'k')")
    assert outbox.execute("select count(*), count(distinct slot) from mailboat.outbox") == [(3, 2)]


def test_functions_with_their_owners_rights_can_not_be_led_astray(outbox: Database, as_writer: str) -> None:
    """The trigger does not use objects of the writer, even if they are first in the writer's search path."""
    with psycopg.connect(as_writer) as connection:
        connection.execute("create temporary table wakeup_requests (outbox text, active boolean)")
        connection.execute(
            "create function pg_temp.pg_notification_queue_usage() returns float8 language plpgsql as"
            " $$ begin raise exception 'led astray'; end $$"
        )
        connection.execute("set search_path = pg_temp, pg_catalog")
        emit(connection, "x", {})
        connection.execute("discard temp")  # the end of the session would do this later, when the role is to be dropped
    assert outbox.execute("select count(*) from mailboat.outbox") == [(1,)]


def _today(database: Database) -> str:
    ((today,),) = database.execute("select to_char(now() at time zone 'UTC', 'YYYYMMDD')")
    return str(today)


def test_a_table_with_columns_of_other_names_is_no_obstacle_and_relays_may_read_it(outbox: Database) -> None:
    """Every later migration grants the roles again, which once failed in a database with such an outbox."""
    make_renamed(outbox)
    outbox.execute("select mailboat.grant_roles()")
    with logged_in(outbox, "mailboat_relay") as url, psycopg.connect(url) as connection:
        assert connection.execute("select from shop.events").fetchall() == []


@pytest.fixture
def mallory(outbox: Database) -> Iterator[str]:
    """User that owns the schema `shop` and nothing else."""
    name = f"mallory_{outbox.name}"
    outbox.execute(sql.SQL("create role {0} login; create schema shop authorization {0}").format(sql.Identifier(name)))
    yield outbox.url_for(name)
    outbox.execute(sql.SQL("drop owned by {0} cascade; drop role {0}").format(sql.Identifier(name)))


def test_a_table_put_in_the_place_of_an_outbox_runs_nothing_with_the_owners_rights(
    outbox: Database, as_relay: str, mallory: str
) -> None:
    outbox.execute("select mailboat.create_outbox('shop.events')")
    with psycopg.connect(mallory) as owner:
        owner.execute("drop table shop.events")  # allowed to the owner of the schema
        owner.execute("create table shop.loot (rights_of text)")
        owner.execute(
            "create function shop.plunder(timestamptz) returns boolean language plpgsql as"
            " $$ begin insert into shop.loot values (current_user); return true; end $$"
        )
        owner.execute("create domain shop.moment as timestamptz check (shop.plunder(value))")
        owner.execute("create table shop.events (created_at shop.moment) partition by range (created_at)")
    with psycopg.connect(as_relay, autocommit=True) as connection, pytest.raises(psycopg.Error, match="is owned by"):
        connection.execute("select mailboat.ensure_partitions('shop.events')")
    assert outbox.execute("select * from shop.loot") == []


@pytest.fixture
def shop(outbox: Database) -> Iterator[dict[str, str]]:
    """Second outbox with its own roles, and the URL of a user in each role."""
    names = {group: f"shop_{group}_{outbox.name}" for group in ("writer", "relay")}
    for name in names.values():
        outbox.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    outbox.execute(
        sql.SQL("select mailboat.create_outbox('shop.events', writer => {writer}, relay => {relay})").format(
            **{group: sql.Literal(name) for group, name in names.items()}
        )
    )
    yield {group: outbox.url_for(name) for group, name in names.items()}
    for name in names.values():
        outbox.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def test_a_writer_of_one_outbox_can_not_write_to_another(
    outbox: Database, shop: dict[str, str], as_writer: str
) -> None:
    for url, own, other in (
        (as_writer, "mailboat.outbox", "shop.events"),
        (shop["writer"], "shop.events", "mailboat.outbox"),
    ):
        with psycopg.connect(url) as connection:
            emit(connection, "x", {}, outbox=own)
            connection.commit()
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                emit(connection, "forged", {}, outbox=other)
    assert outbox.execute("select event_type from mailboat.outbox union all select event_type from shop.events") == [
        ("x",),
        ("x",),
    ]


_FORGED = (
    "insert into mailboat.parked (subscription_id, partition, sequence, id, event_id, event_type, content_type,"
    " created_at, slot) select id, 0, 1, 1, gen_random_uuid(), 'forged', 'text/plain', now(), 0"
    " from mailboat.subscriptions where outbox = 'mailboat.outbox'"
)


@pytest.mark.parametrize(
    "statement",
    [
        _FORGED,
        _FORGED.replace("mailboat.parked (", "mailboat.dead_letters (attempts, reason, last_error, first_failed_at,"
                        " last_failed_at, ").replace("select id", "select 1, '', '', now(), now(), id"),
        "update mailboat.cursors set settled_snapshot = pg_current_snapshot()",
        "update mailboat.parked set subscription_id = (select max(id) from mailboat.subscriptions)",
        "delete from mailboat.parked",
        "update mailboat.subscriptions set state = 'Paused' where outbox = 'mailboat.outbox'",
        "update mailboat.subscriptions set outbox = 'mailboat.outbox' where outbox = 'shop.events'",
        "delete from mailboat.subscriptions where outbox = 'mailboat.outbox'",
        "insert into mailboat.wakeup_requests values ('me', 'mailboat.outbox', true)",
        "update mailboat.relays set expires_at = 'infinity'",
        "select * from mailboat.outbox",
    ],
)  # fmt: skip
def test_a_relay_of_one_outbox_changes_nothing_of_another(
    outbox: Database, shop: dict[str, str], statement: str
) -> None:
    outbox.execute(
        "insert into mailboat.relays (id, incarnation, outbox, session_lock, beat_at, expires_at)"
        " values ('r', gen_random_uuid(), 'mailboat.outbox', true, now(), now())"
    )
    outbox.execute(
        "insert into mailboat.subscriptions (outbox, name, partitions) values ('mailboat.outbox', 'a/b', 1),"
        " ('shop.events', 'c/d', 1)"
    )
    outbox.execute(
        "insert into mailboat.cursors (subscription_id, partition, settled_snapshot, system_identifier, timeline)"
        " select id, 0, '3:3:', 1, 1 from mailboat.subscriptions where outbox = 'mailboat.outbox'"
    )
    outbox.execute(sql.Composed([sql.SQL(_FORGED)]))
    with psycopg.connect(shop["relay"]) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement)


def _checked(database: Database) -> list[str]:
    """Return the triggers that an update of a cursor runs."""
    [([plan],)] = database.execute(
        "explain (analyze, format json) update mailboat.cursors set position = position where partition = 0"
    )
    return [trigger["Trigger Name"] for trigger in plan["Triggers"]]


def test_rights_on_progress_are_checked_only_where_outboxes_have_different_relay_roles(outbox: Database) -> None:
    assert _checked(outbox) == []
    outbox.execute("select mailboat.create_outbox('shop.events')")
    assert _checked(outbox) == []
    outbox.execute("select mailboat.create_outbox('shop.events', relay => 'postgres')")
    assert _checked(outbox) == ["rights_update"]
    outbox.execute("delete from mailboat.outboxes where name = 'shop.events'")
    assert _checked(outbox) == ["rights_update"], "it may come back with a rollback"


def test_a_relay_role_of_an_outbox_may_call_the_functions_of_consumers(outbox: Database, shop: dict[str, str]) -> None:
    with psycopg.connect(shop["relay"]) as connection:
        granted = connection.execute(
            "select p.proname from pg_proc p where p.pronamespace = 'mailboat'::regnamespace"
            " and p.proname in ('pull', 'pull_lag', 'heartbeat')"
            " and has_function_privilege(p.oid, 'execute') order by 1"
        ).fetchall()
    assert granted == [("heartbeat",), ("pull",), ("pull_lag",)]


async def test_a_relay_with_rights_on_one_outbox_serves_it(outbox: Database, shop: dict[str, str]) -> None:
    world = PostgresWorld(outbox, TableLayout("shop.events"), url=shop["relay"])
    relay = await Relay.start(world, [subscription()])
    await relay.claim()
    write(world, "k")
    assert len(await relay.drained()) == 1
    await world.close()
    link = await PostgresConnection.open(lambda: shop["relay"], "forget")
    assert await forget(link, "shop.events", "shop/all"), "what hangs on a subscription goes with it"
    assert await verify(link.connection, TableLayout("shop.events")) == []
    await link.close()


def test_rights_on_an_outbox_go_with_its_roles(outbox: Database, as_writer: str, as_relay: str) -> None:
    outbox.execute("select mailboat.create_outbox('mailboat.outbox', writer => 'postgres', relay => 'postgres')")
    for url, statement in ((as_writer, "select mailboat.emit('x', '{}')"), (as_relay, "select from mailboat.parked")):
        with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement)
    outbox.execute("select mailboat.create_outbox('mailboat.outbox', writer => 'mailboat_writer')")
    with psycopg.connect(as_writer) as connection:
        connection.execute("select mailboat.emit('x', '{}')")
