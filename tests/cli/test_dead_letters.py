"""``mailboat dlq`` and ``mailboat parked``: selection, output, and the order of replays and retries (G2, G6)."""

from __future__ import annotations

import asyncio
import json
import uuid

import psycopg
import pytest
from psycopg import sql

from mailboat.cli.failed_events import paced
from mailboat.store.admin.dead_letters import Candidate, candidates, plan, replay
from mailboat.store.admin.selection import Match
from support.cli import Place, make_known, subscription_manifest
from support.databases import connected

SLOT = 6  # the slot of all events in these tests: partition 0 of 2


@pytest.fixture
def number(place: Place) -> int:
    """The id of subscription shop/to-log."""
    (found,) = asyncio.run(make_known(place.database, subscription_manifest()))
    return found


def bury(place: Place, number: int, sequence: int, key: str | None = "k", **changes: object) -> int:
    """Insert a dead letter and return its number."""
    values: dict[str, object] = {
        "subscription_id": number,
        "partition": 0,
        "attempts": 5,
        "sequence": sequence,
        "reason": "TooLarge",
        "last_error": "the broker refused it",
        "first_failed_at": "2026-01-01T10:00:00Z",
        "last_failed_at": "2026-01-01T11:00:00Z",
        "died_at": "2026-01-01T11:00:00Z",
        "id": sequence,
        "event_id": uuid.uuid4(),
        "event_type": "order.placed",
        "key": key,
        "payload": b'{"total":12.50,"lines":[]}',
        "content_type": "application/json",
        "created_at": "2026-01-01T09:00:00Z",
        "slot": SLOT,
    }
    return _insert(place, "dead_letters", "dead_id", values | changes)


def park(place: Place, number: int, sequence: int, key: str | None = "k", **changes: object) -> int:
    """Insert a parked event and return its number."""
    values: dict[str, object] = {
        "subscription_id": number,
        "partition": 0,
        "attempts": 3,
        "sequence": sequence,
        "reason": "Refused",
        "last_error": "not today",
        "id": sequence,
        "event_id": uuid.uuid4(),
        "event_type": "order.placed",
        "key": key,
        "payload": b"{}",
        "content_type": "application/json",
        "created_at": "2026-01-01T09:00:00Z",
        "slot": SLOT,
    }
    return _insert(place, "parked", "ordinal", values | changes)


def _insert(place: Place, table: str, number: str, values: dict[str, object]) -> int:
    statement = sql.SQL("insert into {} ({}) values ({}) returning {}").format(
        sql.Identifier("mailboat", table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(map(sql.Literal, values.values())),
        sql.Identifier(number),
    )
    return int(place.database.execute(statement)[0][0])


def queue(place: Place) -> list[tuple[object, ...]]:
    """Return the parked events in the order of sending: sequence, rank, replay, attempts, due."""
    return place.database.execute(
        "select sequence, rank, replay, attempts, next_attempt_at <= clock_timestamp() from mailboat.parked"
        " order by key, rank, case when rank = 0 then id end, ordinal"
    )


# ---- dlq list and show --------------------------------------------------------------------------------------------


def test_the_list_has_a_line_per_dead_letter(place, number):
    first = bury(place, number, 1)
    second = bury(place, number, 2, key=None, event_type="order.paid", last_error="too\nmany\x1b[31m words")
    header, *lines = place.ok("dlq", "list").splitlines()
    assert header.split() == ["ID", "SUBSCRIPTION", "TYPE", "KEY", "ATTEMPTS", "DIED", "REPLAYED", "REASON", "ERROR"]
    assert lines[0].split(maxsplit=8) == [
        str(first), "shop/to-log", "order.placed", "k", "5", "2026-01-01T11:00:00Z", "-", "TooLarge",
        "the broker refused it",
    ]  # fmt: skip
    assert lines[1].split(maxsplit=8)[::8] == [str(second), "too many\\x1b[31m words"]


def test_an_empty_list_prints_a_message(place, number):
    assert place.ok("dlq", "list") == "no dead letters\n"
    assert place.ok("dlq", "list", "--key", "k") == "no dead letters match\n"


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ((), [1, 2, 3]),
        (("--subscription", "to-log"), [1, 2, 3]),
        (("--subscription", "shop/to-log"), [1, 2, 3]),
        (("--subscription", "shop/other"), []),
        (("--key", "a"), [1, 2]),
        (("--type", "order.*"), [1, 3]),
        (("--type", "order_p*"), []),
        (("--error", "REFUSED"), [1, 3]),
        (("--error", "toolarge"), [1, 2]),
        (("--since", "2026-01-02T00:00:00Z"), [3]),
        (("--until", "2026-01-02T00:00:00Z"), [1, 2]),
        (("--since", "1m"), []),
        (("--limit", "2"), [2, 3]),
        (("--key", "a", "--type", "invoice.*"), [2]),
    ],
)
def test_filters_narrow_the_list(place, number, filters, found):
    ids = {
        bury(place, number, 1, key="a"): 1,
        bury(place, number, 2, key="a", event_type="invoice.sent", last_error="no such topic"): 2,
        bury(place, number, 3, key="b", reason="Invalid", died_at="2026-01-03T00:00:00Z"): 3,
    }
    bury(place, number, 4, replayed_at="2026-01-04T00:00:00Z")
    asyncio.run(make_known(place.database, subscription_manifest("other")))
    listed = [json.loads(line) for line in place.ok("dlq", "list", "--json", *filters).splitlines()]
    assert [ids[letter["dead_id"]] for letter in listed] == found


def test_a_dead_letter_is_shown_whole_and_readable(place, number):
    event_id = uuid.uuid4()
    dead = bury(place, number, 7, event_id=event_id, tags=["eu", "big"])
    for name in (str(dead), str(event_id)):
        shown = place.ok("dlq", "show", name)
        assert "event id         " + str(event_id) in shown
        assert "tags             eu, big" in shown
        assert shown.endswith('payload\n{\n  "total": 12.50,\n  "lines": []\n}\n')


def test_a_dead_letter_is_one_document_for_programs(place, number):
    payload = b'{\n "total": 12.50, "note": "\xc2\x9b31m"}'
    dead = bury(place, number, 7, event_id=uuid.UUID(int=7), payload=payload, key="k", headers='{"h": "v"}')
    (line,) = place.ok("dlq", "show", str(dead), "--json").splitlines()
    assert '{  "total": 12.50, "note": "\\u009b31m"}' in line
    document = json.loads(line)
    original = document.pop("originalEvent")
    assert original == {
        "id": str(uuid.UUID(int=7)),
        "type": "order.placed",
        "key": "k",
        "aggregateType": None,
        "aggregateId": None,
        "createdAt": "2026-01-01T09:00:00+00:00",
        "contentType": "application/json",
        "headers": {"h": "v"},
        "tags": [],
        "traceparent": None,
        "payload": json.loads(payload),
        "payloadBase64": None,
        "payloadBytes": len(payload),
    }
    assert document == {
        "reason": "TooLarge",
        "failedAt": "2026-01-01T11:00:00+00:00",
        "error": "the broker refused it",
        "attempts": 5,
        "consumer": "shop/to-log",
        "source": {"outbox": "mailboat.outbox", "position": 7, "partition": 0, "deadLetter": dead},
    }


@pytest.mark.parametrize(
    ("payload", "content_type", "shown"),
    [
        (None, "application/json", "(none: a tombstone)"),
        (b'{"a": "\xc2\x9b31m\xe2\x80\xae"}', "application/json", '{\n  "a": "\\x9b31m\\u202e"\n}'),
        (b"\x1b]0;owned\x07plain", "text/plain", "\\x1b]0;owned\\x07plain"),
        (b"\x00\xff", "application/octet-stream", "(not text) 00 ff"),
        (b"{broken", "application/json", "{broken"),
    ],
)
def test_no_payload_steers_the_terminal(place, number, payload, content_type, shown):
    dead = bury(place, number, 1, payload=payload, content_type=content_type)
    assert place.ok("dlq", "show", str(dead)).endswith(f"payload\n{shown}\n")


def test_a_missing_dead_letter_is_reported(place, number):
    result = place.mailboat("dlq", "show", "4711")
    assert (result.exit_code, "there is no dead letter 4711" in result.stderr) == (3, True)


# ---- dlq replay ---------------------------------------------------------------------------------------------------


def test_dead_letters_of_a_key_come_back_at_its_head_in_their_own_order(place, number):
    bury(place, number, 5)
    bury(place, number, 3)
    park(place, number, 8, next_attempt_at="2026-01-01T00:00:00Z")
    park(place, number, 9)
    assert place.ok("dlq", "replay", "--key", "k") == "2 dead letters replayed\n"
    assert queue(place) == [
        (3, 0, True, 0, True),
        (5, 0, True, 0, None),
        (8, 1, False, 3, None),
        (9, 1, False, 3, None),
    ]
    assert place.database.execute("select count(*) from mailboat.dead_letters where replayed_at is null") == [(0,)]


def test_a_later_replay_of_an_earlier_event_goes_before_the_one_that_waits(place, number):
    bury(place, number, 5)
    place.ok("dlq", "replay", "--all")
    bury(place, number, 2)
    place.ok("dlq", "replay", "--all")
    assert [(row[0], row[4]) for row in queue(place)] == [(2, True), (5, None)]


def test_numbers_from_before_a_change_of_partitions_do_not_change_the_order(place, number):
    bury(place, number, 5, id=2)
    bury(place, number, 900, id=1)
    place.ok("dlq", "replay", "--all")
    assert [(row[0], row[4]) for row in queue(place)] == [(900, True), (5, None)]


def test_a_retry_after_a_change_of_partitions_is_of_the_older_event(place, number):
    park(place, number, 900, id=1, next_attempt_at="2030-01-01T00:00:00Z")
    park(place, number, 5, id=2)
    assert [line.split()[3] for line in place.ok("parked", "list").splitlines()[1:]] == ["k"]
    place.ok("parked", "retry", "--all")
    assert [(row[0], row[4]) for row in queue(place)] == [(900, True), (5, None)]


def test_a_drop_after_a_change_of_partitions_leaves_the_older_event_at_the_head(place, number):
    park(place, number, 900, id=1, next_attempt_at="2030-01-01T00:00:00Z")
    park(place, number, 5, id=2)
    third = park(place, number, 6, id=3)
    place.ok("parked", "drop", "--id", str(third), "--yes")
    assert [(row[0], row[4]) for row in queue(place)] == [(900, False), (5, None)]


def test_a_replay_brings_back_the_whole_event(place, number):
    event_id = uuid.uuid4()
    bury(
        place, number, 4, event_id=event_id, tags=["x"], headers='{"tenant": "a"}', aggregate_id="o-1", traceparent="t"
    )
    place.ok("dlq", "replay", "--id", str(event_id))
    (row,) = place.database.execute(
        "select event_id, event_type, key, convert_from(payload, 'UTF8'), headers, tags, aggregate_id, traceparent,"
        " created_at = '2026-01-01T09:00:00Z', slot, reason from mailboat.parked"
    )
    assert row == (
        event_id, "order.placed", "k", '{"total":12.50,"lines":[]}', {"tenant": "a"}, ["x"], "o-1", "t", True, SLOT,
        "TooLarge",
    )  # fmt: skip


def test_the_partition_is_the_current_one_of_the_key(place, number):
    bury(place, number, 1, partition=0, slot=7)
    place.ok("dlq", "replay", "--all")
    assert place.database.execute("select partition from mailboat.parked") == [(1,)]


def test_events_without_a_key_do_not_wait(place, number):
    bury(place, number, 1, key=None)
    bury(place, number, 2, key=None)
    place.ok("dlq", "replay", "--all")
    assert [row[4] for row in queue(place)] == [True, True]


@pytest.fixture
def unordered(place: Place) -> None:
    """The manifest with ``ordering: None``."""
    manifest = place.folder / "manifests.yaml"
    manifest.write_text(manifest.read_text().replace("partitions: 2", "partitions: 2\n  ordering: None"))


def test_without_ordering_no_event_waits(place, number, unordered):
    bury(place, number, 1)
    bury(place, number, 2)
    place.ok("dlq", "replay", "--all")
    assert [row[4] for row in queue(place)] == [True, True]


def test_without_ordering_a_dropped_event_blocks_no_other(place, number, unordered):
    for sequence in (1, 2, 3):
        last = park(place, number, sequence, next_attempt_at="2030-01-01T00:00:00Z")
    assert len(place.ok("parked", "list").splitlines()) == 1 + 3
    place.ok("parked", "drop", "--id", str(last), "--yes")
    assert [row[4] for row in queue(place)] == [False, False]


def test_without_ordering_each_event_is_retried_alone(place, number, unordered):
    for sequence in (1, 2):
        park(place, number, sequence, next_attempt_at="2030-01-01T00:00:00Z")
    assert place.ok("parked", "retry", "--all") == "2 events will be tried now\n"
    assert [row[4] for row in queue(place)] == [True, True]


def test_a_dry_run_prints_the_replay_and_changes_nothing(place, number):
    dead = bury(place, number, 1)
    assert place.ok("dlq", "replay", "--all", "--dry-run").splitlines() == [
        f"{dead} shop/to-log order.placed key k: would be replayed",
        "1 dead letter would be replayed",
    ]
    assert queue(place) == []
    assert place.database.execute("select replayed_at from mailboat.dead_letters") == [(None,)]


def test_the_same_one_is_not_replayed_twice_by_mistake(place, number):
    dead = bury(place, number, 1)
    place.ok("dlq", "replay", "--id", str(dead))
    assert place.ok("dlq", "replay", "--id", str(dead)).splitlines() == [
        f"{dead} shop/to-log order.placed key k: waits to be sent already",
        "0 dead letters replayed",
    ]
    place.database.execute("delete from mailboat.parked")  # as after a delivery
    assert place.ok("dlq", "replay", "--all") == "0 dead letters replayed\n"
    refused = place.mailboat("dlq", "replay", "--id", str(dead))
    assert (refused.exit_code, "say --again" in refused.stderr) == (3, True)
    assert place.ok("dlq", "replay", "--id", str(dead), "--again") == "1 dead letter replayed\n"


def test_an_event_that_died_twice_is_replayed_once(place, number):
    event_id = uuid.uuid4()
    bury(place, number, 1, event_id=event_id, replayed_at="2026-01-01T12:00:00Z")
    bury(place, number, 1, event_id=event_id)
    assert place.ok("dlq", "replay", "--all", "--again") == "1 dead letter replayed\n"
    assert len(queue(place)) == 1


def retire(place: Place, number: int) -> None:
    """Mark the subscription as deleted, without cursors and parked events."""
    for table in ("cursors", "parked"):
        place.database.execute(
            sql.SQL("delete from {} where subscription_id = {}").format(
                sql.Identifier("mailboat", table), sql.Literal(number)
            )
        )
    place.database.execute(
        sql.SQL("update mailboat.subscriptions set retired_at = now() where id = {}").format(sql.Literal(number))
    )


@pytest.mark.parametrize("options", [["--all"], ["--all", "--dry-run"]], ids=["replay", "dry run"])
def test_dead_letters_of_a_deleted_subscription_are_refused_and_stay(place, number, options):
    dead = bury(place, number, 1)
    retire(place, number)
    told = place.mailboat("dlq", "replay", *options)
    assert told.exit_code != 0
    assert f"{dead} shop/to-log order.placed key k: its subscription was deleted" in told.output
    assert "create a subscription shop/to-log again" in told.output
    assert not queue(place)
    assert place.database.execute("select replayed_at from mailboat.dead_letters") == [(None,)]


def test_dead_letters_of_a_deleted_subscription_keep_no_others_back(place, number):
    orphaned = bury(place, number, 1)
    retire(place, number)
    (other,) = asyncio.run(make_known(place.database, subscription_manifest(name="other")))
    bury(place, other, 2)
    told = place.ok("dlq", "replay", "--all")
    assert f"{orphaned} shop/to-log order.placed key k: its subscription was deleted" in told
    assert told.endswith("1 dead letter replayed\n")
    assert [row[0] for row in queue(place)] == [2]


def test_a_subscription_deleted_meanwhile_drops_no_events(place, number):
    dead = bury(place, number, 1)

    async def too_late() -> int:
        async with connected(place.database.url, "dlq replay") as link:
            found = await candidates(link, Match("mailboat.outbox"), replayed=False, limit=None)
            retire(place, number)
            return await replay(link, "mailboat.outbox", found, again=False)

    assert asyncio.run(too_late()) == 0
    assert place.database.execute("select dead_id, replayed_at from mailboat.dead_letters") == [(dead, None)]


def test_idle_relays_are_woken(place, number):
    bury(place, number, 1)
    with psycopg.connect(place.database.url, autocommit=True) as listener:
        listener.execute("listen mailboat")
        place.ok("dlq", "replay", "--all")
        assert [each.payload for each in listener.notifies(timeout=60, stop_after=1)] == ["mailboat.outbox"]


def test_only_replayed_dead_letters_can_be_purged(place, number):
    bury(place, number, 1)
    bury(place, number, 2, replayed_at="2026-01-01T12:00:00Z")
    place.database.execute("update mailboat.dead_letters set replayed_at = now() where replayed_at is not null")
    assert place.mailboat("dlq", "purge", "--all").exit_code == 3
    assert place.ok("dlq", "purge", "--all", "--yes") == "0 dead letters deleted\n"
    assert place.ok("dlq", "purge", "--all", "--yes", "--older-than", "0s") == "1 dead letter deleted\n"
    assert place.database.execute("select sequence from mailboat.dead_letters") == [(1,)]


def test_a_purge_by_other_filters_than_the_id_reads_no_payload(place, number, monkeypatch):
    bury(place, number, 1, replayed_at="2026-01-02T00:00:00Z")
    monkeypatch.setattr("mailboat.cli.failed_events.dead_letters.show_dead", None)
    assert place.ok("dlq", "purge", "--key", "k", "--yes", "--older-than", "0s") == "1 dead letter deleted\n"


def test_a_purge_deletes_no_more_than_the_limit_and_the_oldest_first(place, number):
    for sequence in range(1, 5):
        bury(place, number, sequence, replayed_at="2026-01-01T12:00:00Z")
    purge = ("dlq", "purge", "--subscription", "to-log", "--yes")
    assert place.ok(*purge, "--limit", "3") == "3 dead letters deleted\n"
    assert place.database.execute("select sequence from mailboat.dead_letters") == [(4,)]
    assert place.ok(*purge, "--limit", "3") == "1 dead letter deleted\n"


def candidate(dead_id: int, event_id: str = "e", *, waits: bool = False) -> Candidate:
    return Candidate(dead_id, "shop/to-log", 1, 0, event_id, "t", "k", None, waits)


def test_a_plan_leaves_out_events_that_must_not_be_sent_twice():
    first, again, other, waiting = candidate(1), candidate(3), candidate(2, "f"), candidate(4, "g", waits=True)
    sorted_out = plan([again, first, other, waiting])
    assert sorted_out.replay == (again, other)
    assert sorted_out.waiting == (waiting,)


@pytest.mark.parametrize(
    ("count", "rate", "expected"),
    [
        (0, None, []),
        (5, None, [(5, 0)]),
        (5, 2, [(2, 0), (2, 1), (1, 1)]),
        (2, 0.5, [(1, 0), (1, 2)]),
        (3, 2.5, [(2, 0), (1, 0.8)]),
    ],
)
def test_a_rate_is_kept_by_batches_and_pauses(count, rate, expected):
    batches = paced([candidate(number) for number in range(count)], rate)
    assert [(len(batch), pytest.approx(pause)) for batch, pause in batches] == expected


# ---- parked -------------------------------------------------------------------------------------------------------


def test_the_list_of_parked_events_shows_heads_and_counts_those_behind(place, number):
    head = park(place, number, 1, next_attempt_at="2030-01-01T00:00:00Z")
    behind = park(place, number, 2, reason=None, last_error=None, attempts=0)
    blocked = park(place, number, 3, key="other", blocked=True)
    header, *lines = place.ok("parked", "list").splitlines()
    listed = [json.loads(each) for each in place.ok("parked", "list", "--json").splitlines()]
    assert [str(each["ordinal"]) for each in listed] == [each.split()[0] for each in lines]
    assert header.startswith("ID")
    assert [line.split()[0] for line in lines] == [str(head), str(blocked)]
    assert lines[0].split()[3:] == ["k", "3", "2030-01-01T00:00:00Z", "1", "Refused", "not", "today"]
    assert "blocked" in lines[1]
    everything = place.ok("parked", "list", "--behind").splitlines()
    assert [line.split()[0] for line in everything[1:]] == [str(head), str(behind), str(blocked)]
    assert "behind its head" in everything[2]


def test_no_parked_events_prints_a_message(place, number):
    assert place.ok("parked", "list") == "nothing is parked\n"


def test_a_parked_event_is_shown_whole(place, number):
    shown = place.ok("parked", "show", str(park(place, number, 1)))
    assert ["last", "error", "not", "today"] in [line.split() for line in shown.splitlines()]
    assert shown.endswith("payload\n{}\n")


def test_a_retry_is_of_the_head_whichever_event_was_meant(place, number):
    park(place, number, 1, next_attempt_at="2030-01-01T00:00:00Z")
    behind = park(place, number, 2)
    assert place.ok("parked", "retry", "--id", str(behind)) == "1 event will be tried now\n"
    assert [(row[0], row[3], row[4]) for row in queue(place)] == [(1, 3, True), (2, 3, None)]


def test_a_manual_retry_of_a_blocked_event_resets_its_attempts(place, number):
    park(place, number, 1, blocked=True, attempts=25)
    park(place, number, 2, key="other", next_attempt_at="2030-01-01T00:00:00Z")
    assert place.ok("parked", "retry", "--all").splitlines() == [
        "2 events will be tried now",
        "1 of them had used up all attempts; they are counted from 0 again",
    ]
    assert place.database.execute("select attempts, blocked from mailboat.parked order by sequence") == [
        (0, False),
        (3, False),
    ]


def test_a_dropped_head_becomes_a_dead_letter_and_its_key_continues(place, number):
    head = park(place, number, 1, next_attempt_at="2030-01-01T00:00:00Z")
    park(place, number, 2)
    refused = place.mailboat("parked", "drop", "--id", str(head))
    assert (refused.exit_code, "gives up on 1 parked event: say --yes" in refused.stderr) == (3, True)
    assert place.ok("parked", "drop", "--id", str(head), "--yes") == "1 event given up on, kept as dead letters\n"
    assert [(row[0], row[4]) for row in queue(place)] == [(2, True)]
    assert place.database.execute("select sequence, attempts, reason, last_error from mailboat.dead_letters") == [
        (1, 3, "Dropped", "not today")
    ]


def test_dropped_events_can_be_replayed(place, number):
    park(place, number, 1)
    place.ok("parked", "drop", "--all", "--yes")
    assert place.ok("dlq", "replay", "--all") == "1 dead letter replayed\n"
    assert queue(place) == [(1, 0, True, 0, True)]
