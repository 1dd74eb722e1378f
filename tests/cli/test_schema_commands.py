"""``migrate``, ``verify`` and ``maintain`` on real databases."""

from __future__ import annotations

from commandline import relay_manifest, subscription_manifest


def test_migrate_says_what_it_would_do_does_it_and_then_has_nothing_to_do(empty_place):
    planned = empty_place.ok("migrate", "--dry-run")
    assert planned.startswith("shop/orders: would apply 0001_bookkeeping.sql, 0002_outbox.sql")
    assert empty_place.database.execute("select to_regnamespace('mailboat')") == [(None,)]

    done = empty_place.ok("migrate")
    assert done.replace("applied", "would apply").splitlines()[0] == planned.strip()
    assert done.splitlines()[1] == "shop/orders: outbox mailboat.outbox is ready"

    assert empty_place.ok("migrate", "--dry-run") == "shop/orders: nothing to apply\n"
    assert empty_place.ok("migrate").splitlines()[0] == "shop/orders: the schema was up to date"


def test_verify_is_content_with_what_migrate_made(place):
    assert place.ok("verify") == "shop/orders: outbox mailboat.outbox has all that Mailboat needs\n"


def test_verify_prints_the_sql_for_what_is_missing_and_changes_nothing(place):
    place.database.execute("drop table mailboat.dead_letters")
    result = place.mailboat("verify")
    assert result.exit_code == 4
    assert "dead_letters" in result.stderr
    assert place.database.execute("select to_regclass('mailboat.dead_letters')") == [(None,)]


def test_migrate_only_verifies_where_others_look_after_the_schema(empty_place):
    empty_place.write(relay_manifest(empty_place.database.url, manageSchema=False), subscription_manifest())
    result = empty_place.mailboat("migrate")
    assert result.exit_code == 4
    assert empty_place.database.execute("select to_regnamespace('mailboat')") == [(None,)]


def test_maintain_makes_partitions_ahead_and_drops_what_expired(place):
    assert place.ok("maintain").splitlines() == [
        "shop/orders: 0 partitions made; there are some for 30 days ahead",
        "shop/orders: 0 partitions dropped",
    ]
    place.database.execute(
        "do $$ begin execute (select string_agg(format('drop table %s', inhrelid::regclass), '; ') from ("
        " select inhrelid from pg_inherits where inhparent = 'mailboat.outbox'::regclass"
        " order by inhrelid::regclass::text desc limit 3) as last); end $$"
    )
    assert place.ok("maintain").startswith("shop/orders: 3 partitions made;")


def test_emit_writes_one_event(place):
    event_id = place.ok(
        "emit", "order.placed", '{"total": 12.50}', "--key", "k1", "--header", "tenant=a=b", "--tag", "eu"
    ).strip()
    (row,) = place.database.execute(
        "select event_id::text, event_type, key, convert_from(payload, 'UTF8'), headers ->> 'tenant', tags"
        " from mailboat.outbox"
    )
    assert row == (event_id, "order.placed", "k1", '{"total": 12.50}', "a=b", ["eu"])
