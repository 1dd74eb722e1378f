"""Verification with ``manageSchema: false``: a relay reports each difference with SQL that repairs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import sql

from mailboat.errors import SchemaMismatch
from mailboat.store.schema.migrate import apply_migrations
from mailboat.store.schema.verify import Finding, verify, verify_or_refuse
from mailboat.store.table import TableLayout
from mailboat_devservers.postgres import Database
from support.renamed_table import RENAMED, make_renamed

OUTBOX = "mailboat.outbox"


async def look(url: str, table: str = OUTBOX, **columns: str) -> list[Finding]:
    async with await psycopg.AsyncConnection.connect(url, client_encoding="utf8") as connection:
        return await verify(connection, TableLayout(table, columns))


async def test_verify_accepts_a_migrated_schema(outbox: Database) -> None:
    assert await look(outbox.url) == []


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("alter sequence mailboat.outbox_id_seq cache 50", "caches 50 numbers"),
        ("drop index mailboat.outbox_xid_idx", "no index begins with it"),
        ("drop trigger mailboat_notify on mailboat.outbox", "no trigger wakes"),
        ("alter table mailboat.outbox disable trigger mailboat_notify", "no trigger wakes"),
        ("alter table mailboat.outbox alter column xid drop default", "must be the transaction's id"),
        ("alter table mailboat.outbox drop column tags", "the column does not exist"),
        ("alter table mailboat.outbox drop column headers", "the column does not exist"),
        ("alter table mailboat.outbox drop column slot", "the column does not exist"),
        ("delete from mailboat.outboxes", "not registered"),
        ("drop table mailboat.outbox", "the table does not exist"),
    ],
)
async def test_damage_is_found_and_its_sql_mends_it(outbox: Database, damage: str, complaint: str) -> None:
    outbox.execute(sql.Composed([sql.SQL(damage)]))
    (finding,) = [each for each in await look(outbox.url) if complaint in each.what]
    if damage.startswith("drop table"):
        outbox.execute("delete from mailboat.outboxes")
    if "disable" in damage:
        outbox.execute("drop trigger mailboat_notify on mailboat.outbox")
    outbox.execute(sql.Composed([sql.SQL(finding.sql)]))
    assert await look(outbox.url) == []
    outbox.execute("select mailboat.emit('works', '{}'::jsonb, key => 'again')")


async def test_a_position_that_no_relay_reads_is_refused_and_found_in_a_table_that_allowed_it(outbox: Database) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        outbox.execute("insert into mailboat.outbox (id, event_type) values (0, 'lost')")
    make_renamed(outbox)
    outbox.execute("alter domain mailboat.position drop constraint well_formed")
    outbox.execute("insert into shop.events (position, type) values (-1, 'lost')")
    (finding,) = await look(outbox.url, RENAMED.table, **RENAMED.columns)
    assert "never delivered" in finding.what


async def test_too_few_partitions_ahead_are_found(outbox: Database) -> None:
    in_four_days = datetime.now(UTC) + timedelta(days=4)
    outbox.execute(sql.SQL("drop table mailboat.{}").format(sql.Identifier(f"outbox_p{in_four_days:%Y%m%d}")))
    (finding,) = await look(outbox.url)
    assert "without one, writers fail" in finding.what
    outbox.execute(sql.Composed([sql.SQL(finding.sql)]))
    assert await look(outbox.url) == []


async def test_an_empty_database_needs_a_migration(each_database: Database) -> None:
    (finding,) = await look(each_database.url)
    assert finding.what == "there is no schema mailboat"
    assert "mailboat migrate --sql" in finding.sql


async def test_a_schema_without_anything_in_it_needs_one_too(each_database: Database) -> None:
    each_database.execute("create schema mailboat")
    (finding,) = await look(each_database.url)
    assert finding.what.startswith("migrations were not applied: 0001_schema")
    assert "mailboat migrate --sql" in finding.sql


async def test_a_table_that_no_migration_would_bring_back_is_found(outbox: Database) -> None:
    outbox.execute("drop table mailboat.dead_letters cascade")
    (finding,) = await look(outbox.url)
    assert finding.what == "tables are missing: dead_letters"
    assert "backup" in finding.sql


async def test_an_unfinished_migration_is_found(outbox: Database) -> None:
    outbox.execute("delete from mailboat.migrations where version = 1")
    (finding,) = await look(outbox.url)
    assert finding.what == "migrations were not applied: 0001_schema"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_another_encoding_is_found_and_not_migrated(outbox: Database, encoding: str) -> None:
    name = f"{outbox.name}_other"
    outbox.server.execute(
        sql.SQL("create database {} encoding {} template template0 lc_collate 'C' lc_ctype 'C'").format(
            sql.Identifier(name), sql.Literal(encoding)
        )
    )
    try:
        findings = await look(outbox.server.url(name))
        assert f"its encoding is {encoding}" in findings[0].what
        url = outbox.server.url(name)
        async with await psycopg.AsyncConnection.connect(url, client_encoding="utf8") as connection:
            with pytest.raises(SchemaMismatch, match=f"its encoding is {encoding}.*encoding 'UTF8'"):
                await apply_migrations(connection, OUTBOX)
    finally:
        outbox.server.drop_database(name)


@pytest.fixture
def stranger(outbox: Database) -> Iterator[str]:
    """User without any rights."""
    name = f"stranger_{outbox.name}"
    outbox.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    yield name
    outbox.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


async def test_a_user_without_rights_gets_the_missing_grant(outbox: Database, stranger: str) -> None:
    (finding,) = await look(outbox.url_for(stranger))
    assert "may not use it" in finding.what
    assert finding.sql == f'grant mailboat_relay to "{stranger}";'
    outbox.execute(sql.Composed([sql.SQL(finding.sql)]))
    assert await look(outbox.url_for(stranger)) == []


async def test_a_policy_that_may_hide_events_is_found(outbox: Database, stranger: str) -> None:
    outbox.execute(sql.SQL("grant mailboat_relay to {}").format(sql.Identifier(stranger)))
    outbox.execute("alter table mailboat.outbox enable row level security")
    (finding,) = await look(outbox.url_for(stranger))
    assert "row level security may hide events" in finding.what
    outbox.execute(sql.Composed([sql.SQL(finding.sql)]))
    assert await look(outbox.url_for(stranger)) == []


async def test_every_single_right_that_is_missing_is_named(outbox: Database, stranger: str) -> None:
    outbox.execute(sql.SQL("grant mailboat_relay to {}").format(sql.Identifier(stranger)))
    outbox.execute("revoke delete on mailboat.parked from mailboat_relay")
    outbox.execute("revoke execute on function mailboat.ensure_partitions(text, interval) from mailboat_relay")
    lacking = {finding.what.split(" lacks ")[1] for finding in await look(outbox.url_for(stranger))}
    assert lacking == {"delete on mailboat.parked", "execute on function mailboat.ensure_partitions(text, interval)"}


async def test_a_user_table_is_repaired_column_by_column(outbox: Database) -> None:
    """An outbox as Debezium users have it, repaired only by the SQL of the findings."""
    names = {
        "id": "position",
        "event_id": "id",
        "event_type": "type",
        "aggregate_type": "aggregatetype",
        "aggregate_id": "aggregateid",
        "key": "aggregateid",
    }
    outbox.execute("create schema shop")
    outbox.execute(
        "create table shop.events (id uuid primary key, aggregatetype varchar(255) not null,"
        " aggregateid varchar(255) not null, type varchar(255) not null, payload bytea)"
    )
    outbox.execute("insert into shop.events values (gen_random_uuid(), 'order', '1', 'placed', '{}')")
    findings = await look(outbox.url, "shop.events", **names)
    assert {finding.where for finding in findings} >= {"shop.events.position", "shop.events.xid", "shop.events.slot"}
    for _ in range(3):  # a missing index is reported only after its columns exist
        for finding in findings:
            outbox.execute(sql.Composed([sql.SQL(finding.sql)]))
        findings = await look(outbox.url, "shop.events", **names)
    assert findings == []
    ((old_rows,),) = outbox.execute("select count(*) from shop.events where xid is null")
    assert old_rows == 1, "events from before are not taken for new ones"


async def test_the_refusal_reads_well_and_holds_every_remedy(outbox: Database) -> None:
    outbox.execute("alter sequence mailboat.outbox_id_seq cache 50")
    outbox.execute("drop index mailboat.outbox_xid_idx")
    async with await psycopg.AsyncConnection.connect(outbox.url) as connection:
        with pytest.raises(SchemaMismatch) as refusal:
            await verify_or_refuse(connection, TableLayout(OUTBOX))
    assert str(refusal.value).splitlines() == [
        "The database is not as Mailboat needs it (2 things are missing or different). SQL that fixes it:",
        "mailboat.outbox.xid: no index begins with it",
        '    create index on mailboat.outbox ("xid");',
        "sequence mailboat.outbox_id_seq: it caches 50 numbers per session, which breaks the order of keys",
        "    alter sequence mailboat.outbox_id_seq cache 1;",
    ]


async def test_a_table_named_by_an_sql_keyword_is_found(outbox: Database) -> None:
    with psycopg.connect(outbox.url) as connection:
        connection.execute("""select mailboat.create_outbox('shop."order"')""")
    async with await psycopg.AsyncConnection.connect(outbox.url) as connected:
        (finding,) = await verify(connected, TableLayout("shop.order"))
    assert 'alter table shop."order" rename to order_outbox;' in str(finding)


_LEGACY = r"""
create schema shop;
create table shop.legacy (
    id bigint generated always as identity primary key, event_id text not null, kind smallint not null,
    customer bigint not null, payload jsonb not null, headers text, created_at timestamp not null default now()
);
insert into shop.legacy (event_id, kind, customer, payload)
values (gen_random_uuid()::text, 1, 7, '{"path": "c:\\\\d"}');
"""


async def test_its_sql_changes_no_column_in_use_and_makes_no_event_wrong(outbox: Database) -> None:
    """Run the SQL as printed on a table that the user created.

    Existing columns stay unchanged, and every event has its payload.
    """
    with psycopg.connect(outbox.url) as connection:
        connection.execute(_LEGACY.encode())
    before = _types(outbox)
    columns = {"event_type": "kind", "key": "customer"}
    for _ in range(3):  # a missing index is reported only after its columns exist
        for finding in await look(outbox.url, "shop.legacy", **columns):
            outbox.execute(sql.Composed([sql.SQL(finding.sql)]))
            if (found := re.search(r"-- and set spec\.outbox\.columns\.(\w+): (\w+)$", finding.sql)) is not None:
                columns[re.sub("([A-Z])", r"_\1", found[1]).lower()] = found[2]
    assert await look(outbox.url, "shop.legacy", **columns) == []
    assert {name: _types(outbox)[name] for name in before} == before
    names = ("event_type", "key", "event_id", "payload", "headers", "created_at")
    assert columns == {name: f"mailboat_{name}" for name in names}
    ((event_type, key, payload, wanted),) = outbox.execute(
        "select mailboat_event_type, mailboat_key, convert_from(mailboat_payload, 'UTF8'), payload::text"
        " from shop.legacy"
    )
    assert (event_type, key, payload) == ("1", "7", wanted)


@pytest.mark.parametrize("column", ["payload", "event_type", "key"])
async def test_a_column_that_only_writers_can_fill_is_not_added(outbox: Database, column: str) -> None:
    outbox.execute("create schema shop")
    outbox.execute("create table shop.bare (id bigint generated always as identity primary key)")
    (finding,) = [each for each in await look(outbox.url, "shop.bare") if each.where == f"shop.bare.{column}"]
    assert finding.sql.startswith("-- name the column that has it in spec.outbox.columns.")


def _types(database: Database) -> dict[str, str]:
    return dict(
        database.execute(
            "select attname::text, format_type(atttypid, atttypmod) from pg_attribute"
            " where attrelid = 'shop.legacy'::regclass and attnum > 0"
        )
    )
