"""``migrate``, ``verify`` and ``maintain`` on real databases."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mailboat_devservers.postgres import Database, find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from support.cli import Place, relay_manifest, subscription_manifest


def test_migrate_prints_the_plan_applies_it_and_then_has_nothing_to_do(empty_place):
    planned = empty_place.ok("migrate", "--dry-run")
    assert planned.startswith("shop/orders: would apply 0001_schema")
    assert empty_place.database.execute("select to_regnamespace('mailboat')") == [(None,)]

    done = empty_place.ok("migrate")
    assert done.replace("applied", "would apply").splitlines()[0] == planned.strip()
    assert done.splitlines()[1] == "shop/orders: outbox mailboat.outbox is ready"

    assert empty_place.ok("migrate", "--dry-run") == "shop/orders: nothing to apply\n"
    assert empty_place.ok("migrate").splitlines()[0] == "shop/orders: the schema was up to date"


def test_verify_accepts_a_database_after_migrate(place):
    assert place.ok("verify") == "shop/orders: outbox mailboat.outbox has all that Mailboat needs\n"


def test_verify_prints_the_sql_for_missing_parts_and_changes_nothing(place):
    place.database.execute("drop table mailboat.dead_letters cascade")
    result = place.mailboat("verify")
    assert result.exit_code == 4
    assert "dead_letters" in result.stderr
    assert place.database.execute("select to_regclass('mailboat.dead_letters')") == [(None,)]


def test_migrate_only_verifies_an_externally_managed_schema(empty_place):
    empty_place.write(relay_manifest(empty_place.database.url, manageSchema=False), subscription_manifest())
    result = empty_place.mailboat("migrate")
    assert result.exit_code == 4
    assert "mailboat migrate --sql" in result.stderr
    assert empty_place.database.execute("select to_regnamespace('mailboat')") == [(None,)]


def psql(database: Database, script: str) -> None:
    """Run the script with the newest psql, because the packages of the oldest server have none."""
    binaries = find_postgres(NEWEST)
    command = [binaries.tool("psql"), "--quiet", "--no-psqlrc", "-v", "ON_ERROR_STOP=1", database.url]
    ran = subprocess.run(command, input=script, env=binaries.env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_the_printed_sql_for_an_administrator_is_sufficient(tmp_path: Path, each_database: Database) -> None:
    place = Place(tmp_path, each_database)
    place.write(relay_manifest(each_database.url, manageSchema=False), subscription_manifest())
    assert "mailboat migrate --sql" in place.mailboat("verify").stderr
    script = place.ok("migrate", "--sql")
    assert each_database.execute("select to_regclass('mailboat.outbox')") == [(None,)], "it only prints"
    psql(each_database, script)
    assert place.ok("verify") == "shop/orders: outbox mailboat.outbox has all that Mailboat needs\n"
    assert place.ok("migrate", "--sql") == "-- shop/orders, outbox mailboat.outbox: nothing to apply\n"
    managed = tmp_path / "managed"
    managed.mkdir()
    also = Place(managed, each_database)
    also.write(relay_manifest(each_database.url), subscription_manifest())
    assert also.ok("migrate", "--dry-run") == "shop/orders: nothing to apply\n"


def test_a_database_with_two_outboxes_is_migrated_once(empty_place):
    other = relay_manifest(empty_place.database.url, manageSchema=False, table="shop.returns")
    other["metadata"]["name"] = "returns"
    empty_place.write(relay_manifest(empty_place.database.url, manageSchema=False), other)
    psql(empty_place.database, empty_place.ok("migrate", "--sql"))
    assert empty_place.ok("verify").splitlines() == [
        "shop/orders: outbox mailboat.outbox has all that Mailboat needs",
        "shop/returns: outbox shop.returns has all that Mailboat needs",
    ]


def test_a_table_of_ones_own_is_left_to_verify(empty_place):
    empty_place.database.execute("create schema shop")
    empty_place.database.execute("create table shop.events (id bigint primary key)")
    own = relay_manifest(empty_place.database.url, manageSchema=False, table="shop.events")
    empty_place.write(own, subscription_manifest())
    psql(empty_place.database, empty_place.ok("migrate", "--sql"))
    assert "shop.events.xid: the column does not exist" in empty_place.mailboat("verify").stderr


def outbox_partitions(database: Database) -> set[str]:
    rows = database.execute(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'mailboat.outbox'::regclass"
    )
    return {name for (name,) in rows}


def test_maintain_creates_partitions_ahead_and_drops_expired_ones(place):
    # Compare the time partitions before and after: a run across midnight creates one more.
    place.ok("maintain")
    last = sorted(outbox_partitions(place.database))[-3:]
    place.database.execute(
        f"drop table {', '.join(last)};"
        " create table mailboat.outbox_p20200101 partition of mailboat.outbox"
        " for values from ('2020-01-01Z') to ('2020-01-02Z')"
    )
    before = outbox_partitions(place.database)
    said = place.ok("maintain").splitlines()
    after = outbox_partitions(place.database)
    assert set(last) <= after - before
    assert before - after == {"mailboat.outbox_p20200101"}
    assert said == [
        f"shop/orders: {len(after - before)} partitions made; there are some for 30 days ahead",
        "shop/orders: 1 partition dropped: mailboat.outbox_p20200101",
    ]


def test_emit_writes_one_event(place):
    event_id = place.ok(
        "emit", "order.placed", '{"total": 12.50}', "--key", "k1", "--header", "tenant=a=b", "--tag", "eu"
    ).strip()
    (row,) = place.database.execute(
        "select event_id::text, event_type, key, convert_from(payload, 'UTF8'), headers ->> 'tenant', tags"
        " from mailboat.outbox"
    )
    assert row == (event_id, "order.placed", "k1", '{"total": 12.50}', "a=b", ["eu"])
