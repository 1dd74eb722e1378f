"""Python and SQL accept the same events, and a refusal names the argument."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from mailboat import EmitRefused, NewEvent
from mailboat.emitter.validation import checked
from mailboat_devservers.postgres import Database

MIB = 1024 * 1024
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def refused_in_python(**fields: Any) -> str | None:
    """The refused argument, if any."""
    try:
        checked(NewEvent(**{"type": "order.placed", **fields}))
    except EmitRefused as refusal:
        return str(refusal).split(" ")[1].split(".")[0]
    return None


def refused_in_sql(connection: psycopg.Connection, **fields: Any) -> str | None:
    arguments = {"event_type": fields.pop("type", "order.placed"), "payload": fields.pop("payload", None), **fields}
    if "headers" in arguments:
        arguments["headers"] = Jsonb(arguments["headers"])
    if isinstance(arguments["payload"], dict | list):
        arguments["payload"] = Jsonb(arguments["payload"])
    casts = {"tags": "::text[]"}
    names = ", ".join(f"{name} => %({name})s{casts.get(name, '')}" for name in arguments)
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(f"select mailboat.emit({names})", arguments)
    except psycopg.errors.InvalidParameterValue as refusal:
        text = refusal.diag.message_primary or ""
        return text.removeprefix("mailboat.emit: ").split(" ")[0].split(".")[0]
    return None


@pytest.fixture(scope="module")
def connection(shared_outbox: Database) -> Iterator[psycopg.Connection]:
    with psycopg.connect(shared_outbox.url) as connection:
        yield connection


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"type": "t" * 255},
    {"type": "bestellung.geändert 🚢"},
    {"key": "k" * 1024},
    {"key": "\t odd, but a key\\"},
    {"aggregate_id": "a", "aggregate_type": "order"},
    {"aggregate_id": "a", "ordered": False},
    {"headers": {}},
    {"headers": {"tenant": "", "x-1.2_3": "ü"}},
    {"headers": {f"h{n}": "v" for n in range(64)}},
    {"headers": {"certificate": "begins with ce, not with ce_"}},
    {"headers": {f"h{n:02}": "ü" * 2046 for n in range(16)}},
    {"tags": []},
    {"tags": ["t" * 128] * 64},
    {"tags": ["{", '"', "\\", ",", "null", " "]},
    {"traceparent": TRACE},
    {"content_type": "application/vnd.acme.order+json; charset=utf-8", "payload": "{}"},
    {"content_type": "text/plain", "payload": "not JSON"},
    {"payload": b"\x00\xff"},
    {"payload": b"x" * (16 * MIB)},
    {"payload": '{"b": 1.50, "a": [null]}'},
    {"payload": {"a": "ü"}},
]

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("type", {"type": ""}),
    ("type", {"type": "t" * 256}),
    ("type", {"type": "a\nb"}),
    ("type", {"type": "a\x7f"}),
    ("aggregate_type", {"aggregate_type": ""}),
    ("aggregate_type", {"aggregate_type": "t" * 256}),
    ("aggregate_type", {"aggregate_type": "a\x01"}),
    ("aggregate_id", {"aggregate_id": ""}),
    ("aggregate_id", {"aggregate_id": "ü" * 513}),
    ("key", {"key": ""}),
    ("key", {"key": "ü" * 513}),
    ("key", {"key": "k" * MIB}),
    ("key", {"key": "k", "ordered": False}),
    ("content_type", {"content_type": ""}),
    ("content_type", {"content_type": "json"}),
    ("content_type", {"content_type": "text/plain\n"}),
    ("content_type", {"content_type": "text/plain\r\nx: y"}),
    ("content_type", {"content_type": "a/" + "b" * 254}),
    ("headers", {"headers": {"": "x"}}),
    ("headers", {"headers": {"a b": "x"}}),
    ("headers", {"headers": {"ü": "x"}}),
    ("headers", {"headers": {"h" * 129: "x"}}),
    ("headers", {"headers": {"ce_id": "x"}}),
    ("headers", {"headers": {"CE-Type": "x"}}),
    ("headers", {"headers": {"Mailboat-Sequence": "x"}}),
    ("headers", {"headers": {"traceparent": TRACE}}),
    ("headers", {"headers": {"Content-Type": "text/plain"}}),
    ("headers", {"headers": {"a": 1}}),
    ("headers", {"headers": {"a": None}}),
    ("headers", {"headers": {"a": "x\r\nSet-Cookie: y"}}),
    ("headers", {"headers": {"a": "x" * 4097}}),
    ("headers", {"headers": ["a", "b"]}),
    ("headers", {"headers": {f"h{n:02}": "ü" * 2047 for n in range(16)}}),
    ("headers", {"headers": {f"h{n:02}": "x" * 4000 for n in range(16)}, "tags": ["ü" * 128] * 6}),
    ("headers", {"headers": {f"h{n}": "v" for n in range(65)}}),
    ("tags", {"tags": [""]}),
    ("tags", {"tags": ["t" * 129]}),
    ("tags", {"tags": ["a\nb"]}),
    ("tags", {"tags": [None]}),
    ("tags", {"tags": ["t"] * 65}),
    ("traceparent", {"traceparent": ""}),
    ("traceparent", {"traceparent": TRACE.upper()}),
    ("traceparent", {"traceparent": "ff" + TRACE[2:]}),
    ("traceparent", {"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}),
    ("traceparent", {"traceparent": f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"}),
    ("traceparent", {"traceparent": TRACE + "\n"}),
    ("payload", {"payload": "not JSON"}),
    ("payload", {"payload": '{"a": NaN}'}),
    ("payload", {"payload": b"x" * (16 * MIB + 1)}),
    ("payload", {"payload": "x" * (20 * MIB), "content_type": "text/plain"}),
]


def short(value: Any) -> str:
    return repr(value)[:40]


@pytest.mark.parametrize("fields", ACCEPTED, ids=short)
def test_python_and_sql_accept(connection: psycopg.Connection, fields: dict[str, Any]) -> None:
    assert refused_in_python(**fields) is None
    assert refused_in_sql(connection, **fields) is None


@pytest.mark.parametrize(("argument", "fields"), REFUSED, ids=short)
def test_python_and_sql_refuse_and_name_the_argument(
    connection: psycopg.Connection, argument: str, fields: dict[str, Any]
) -> None:
    assert refused_in_python(**fields) == argument
    assert refused_in_sql(connection, **fields) == ("event_type" if argument == "type" else argument)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=300)
FEW = st.sampled_from(["ce_", "mailboat-", "application/json", "a/b;", "\x1f", "\x7f", "\x80", "\u2028", " ", "\n", ""])
WELL_FORMED = r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
HOSTILE = st.builds(lambda *parts: "".join(parts), FEW, TEXT, FEW)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "type": HOSTILE,
            "key": HOSTILE,
            "aggregate_type": HOSTILE,
            "aggregate_id": HOSTILE,
            "content_type": HOSTILE,
            "headers": st.dictionaries(HOSTILE, HOSTILE | st.none() | st.integers(), max_size=3),
            "tags": st.lists(HOSTILE | st.none(), max_size=3),
            "traceparent": st.from_regex(WELL_FORMED, fullmatch=True) | HOSTILE,
            "ordered": st.booleans(),
        },
    )
)
def test_python_and_sql_agree_about_random_events(connection: psycopg.Connection, fields: dict[str, Any]) -> None:
    in_python, in_sql = refused_in_python(**fields), refused_in_sql(connection, **fields)
    assert (in_python is None) == (in_sql is None), (in_python, in_sql)


# ---- values that only Python has ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "fields"),
    [
        ("type", {"type": None}),
        ("type", {"type": "a\0"}),
        ("type", {"type": "a\ud800"}),
        ("key", {"key": "a\0b"}),
        ("key", {"key": "\udfff"}),
        ("aggregate_id", {"aggregate_id": "a\0"}),
        ("headers", {"headers": {"a": "x\0"}}),
        ("headers", {"headers": {"a": "\ud800"}}),
        ("headers", {"headers": {"a": b"\xff"}}),
        ("headers", {"headers": {1: "x"}}),
        ("headers", {"headers": "a=b"}),
        ("tags", {"tags": "not a list"}),
        ("tags", {"tags": 7}),
        ("tags", {"tags": ["\ud800"]}),
        ("event_id", {"event_id": "not a uuid"}),
        ("event_id", {"event_id": 7}),
        ("payload", {"payload": {"a": float("nan")}}),
        ("payload", {"payload": {"a": 1j}}),
        ("payload", {"payload": {"a": "\ud800"}}),
        ("payload", {"payload": "\ud800", "content_type": "text/plain"}),
        ("payload", {"payload": {"a": "x" * (17 * MIB)}}),
    ],
    ids=short,
)
def test_python_refuses(argument: str, fields: dict[str, Any]) -> None:
    assert refused_in_python(**fields) == argument


def test_a_refusal_of_many_has_the_index_of_the_event() -> None:
    with pytest.raises(EmitRefused, match=r"^emit: events\[3\]\.key must not be empty"):
        checked(NewEvent("x", key=""), where="events[3].")


def test_a_refusal_never_shows_the_payload() -> None:
    with pytest.raises(EmitRefused) as refusal:
        checked(NewEvent("x", '{"password": "hunter2"'))
    assert "hunter2" not in str(refusal.value)


# ---- SQL only -------------------------------------------------------------------------------------------------------


def test_emit_many_takes_an_array_of_objects(connection: psycopg.Connection) -> None:
    events = [
        {"event_type": "a", "payload": {"n": 1}, "aggregate_id": "x", "headers": {"h": "v"}, "tags": ["t"]},
        {"event_type": "b"},
        {"event_type": "c", "payload": "plain", "content_type": "text/plain", "key": "k", "traceparent": TRACE},
        {"event_type": "d", "payload": None, "aggregate_id": "x", "ordered": False, "headers": None, "tags": None},
        {"event_type": "e", "payload": "a JSON string"},
    ]
    with connection.transaction(force_rollback=True):
        ids = connection.execute("select mailboat.emit_many(%s)", (Jsonb(events),)).fetchall()
        rows = connection.execute(
            "select event_id, event_type, key, payload, content_type, headers, tags, traceparent"
            " from mailboat.outbox order by id"
        ).fetchall()
    assert [row[:1] for row in rows] == ids
    assert [row[1:] for row in rows] == [
        ("a", "x", b'{"n": 1}', "application/json", {"h": "v"}, ["t"], None),
        ("b", None, None, "application/json", None, [], None),
        ("c", "k", b"plain", "text/plain", None, [], TRACE),
        ("d", None, None, "application/json", None, [], None),
        ("e", None, b'"a JSON string"', "application/json", None, [], None),
    ]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ({}, "events must be an array"),
        ([1], "events must be an array of objects"),
        ([{"event_type": "a", "aggregateId": "x"}], 'events have no field "aggregateId"'),
        ([{"event_type": "a"}, {"event_type": ""}], "event_type must not be empty"),
        ([{"payload": {}}], "event_type must not be empty"),
        ([{"event_type": "a", "payload": {}, "content_type": "text/plain"}], "payload must be a string"),
        ([{"event_type": "a", "headers": {"ce_id": "x"}}], "headers contain the name ce_id"),
    ],
)
def test_one_invalid_event_refuses_all_of_emit_many(
    connection: psycopg.Connection, events: Any, complaint: str
) -> None:
    with (
        pytest.raises(psycopg.errors.InvalidParameterValue, match=complaint),
        connection.transaction(force_rollback=True),
    ):
        connection.execute("select mailboat.emit_many(%s)", (Jsonb(events),))


@pytest.mark.parametrize(
    ("payload", "stored", "content_type"),
    [
        ("""'{"b": 1, "a": 1.50}'""", b'{"b": 1, "a": 1.50}', "application/json"),
        ("""'{"b": 1,  "a": 1.50}'::json""", b'{"b": 1,  "a": 1.50}', "application/json"),
        ("""'{"b": 1, "a": 2}'::jsonb""", b'{"a": 2, "b": 1}', "application/json"),
        (r"'\x00ff'::bytea", b"\x00\xff", "application/octet-stream"),
        ("null", None, "application/json"),
    ],
)
def test_payloads_of_all_sql_types_are_stored(
    connection: psycopg.Connection, payload: str, stored: bytes | None, content_type: str
) -> None:
    with connection.transaction(force_rollback=True):
        connection.execute(f"select mailboat.emit('x', {payload})")
        row = connection.execute("select payload, content_type from mailboat.outbox").fetchone()
    assert row == (stored, content_type)


@pytest.mark.parametrize("payload", ["'{}'", "'{}'::jsonb", "'{}'::json", "'{}'::bytea"])
def test_ids_may_be_of_type_uuid_and_literals_stay_text(connection: psycopg.Connection, payload: str) -> None:
    one, two = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
    ids = {
        f"aggregate_id => '{one}'::uuid": (one, one),
        f"key => '{one}'::uuid": (None, one),
        f"aggregate_id => '{one}'::uuid, key => '{two}'::uuid": (one, two),
        f"aggregate_id => '{one}'::uuid, key => 'k'": (one, "k"),
        f"aggregate_id => 'a', key => '{two}'::uuid": ("a", two),
        "aggregate_id => 'a', key => 'k'": ("a", "k"),
        "aggregate_type => 'order'": (None, None),
    }
    with connection.transaction(force_rollback=True):
        for arguments in ids:
            connection.execute(f"select mailboat.emit('x', {payload}, {arguments})".encode())
        connection.execute(f"select mailboat.emit('x', {payload}, aggregate_id => %s, key => %s)".encode(), ("a", "k"))
        rows = connection.execute("select aggregate_id, key from mailboat.outbox order by id").fetchall()
    assert rows == [*ids.values(), ("a", "k")]


def test_a_plain_insert_is_checked_and_gets_the_key_of_its_aggregate(connection: psycopg.Connection) -> None:
    insert = "insert into mailboat.new_events (event_type, aggregate_id, payload, ordered) values (%s, 'o-1', %s, %s)"
    payload = {"path": "C:\\temp\\new", "quoted": '"ü"'}
    with connection.transaction(force_rollback=True):
        (event_id,) = (
            connection.execute(f"{insert} returning event_id".encode(), ("x", json.dumps(payload), None)).fetchone()
            or ()
        )
        connection.execute(insert.encode(), ("x", json.dumps(payload), False))
        rows = connection.execute("select event_id, key, payload from mailboat.outbox order by id").fetchall()
        assert [(row[1], json.loads(row[2])) for row in rows] == [("o-1", payload), (None, payload)]
        assert rows[0][0] == event_id
    with (
        pytest.raises(psycopg.errors.InvalidParameterValue, match="event_type must not be empty"),
        connection.transaction(force_rollback=True),
    ):
        connection.execute(insert.encode(), ("", "{}", None))


def test_a_missing_outbox_is_named(connection: psycopg.Connection) -> None:
    for call in ("emit('x', '{}'::jsonb, outbox => 'no.where')", "emit_many('[]', 'no.where')"):
        with (
            pytest.raises(psycopg.errors.InvalidParameterValue, match=r"outbox no\.where does not exist; make it"),
            connection.transaction(force_rollback=True),
        ):
            connection.execute(f"select mailboat.{call}")


@given(key=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_keys_slot_is_its_sha256(connection: psycopg.Connection, key: str) -> None:
    """The hash is part of the contract: it determines the partition in every version of Postgres."""
    expected = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") & 0x7FFFFFFF
    assert connection.execute("select mailboat.key_slot(%s, 1)", (key,)).fetchone() == (expected,)


@pytest.mark.parametrize(
    ("column", "expression", "taken"),
    [
        ("payload", "convert_to(repeat('x', 16777217), 'UTF8')", False),
        ("payload", "convert_to(repeat('x', 16777216), 'UTF8')", True),
        ("key", "repeat('k', 1025)", False),
        ("key", "repeat('ü', 513)", False),  # bytes are counted, not letters
        ("key", "repeat('ü', 512)", True),
        ("headers", """jsonb_build_object('h', repeat('"', 131072))""", False),
        ("headers", """jsonb_build_object('h', repeat('"', 131060))""", True),
        ("headers", "jsonb_build_object('h', 1e131071, 'i', 1e131071)", False),  # few bytes on disk
        ("tags", "array_fill('t'::text, array[131073])", False),
        ("aggregate_type", "repeat('t', 1025)", False),
        ("aggregate_id", "repeat('t', 1025)", False),
        ("content_type", "repeat('t', 1025)", False),
        ("traceparent", "repeat('t', 1025)", False),
    ],
)
def test_check_constraints_limit_rows_inserted_by_plain_sql(
    newest_outbox: Database, column: LiteralString, expression: LiteralString, taken: bool
) -> None:
    statement = f"insert into mailboat.outbox (event_type, {column}) values ('order.placed', {expression})"
    if taken:
        newest_outbox.execute(statement)
    else:
        with pytest.raises(psycopg.errors.CheckViolation, match="well_formed"):
            newest_outbox.execute(statement)
    assert newest_outbox.execute("select count(*) from mailboat.outbox") == [(int(taken),)]
