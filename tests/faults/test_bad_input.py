"""What people and applications get wrong, through the real command line: a sentence that helps, or a counted refusal.

Never a traceback, never a secret, never a lost event.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from mailboat_harbor.kafka import KafkaServer, start_kfake
from mailboat_harbor.ports import free_port
from mailboat_harbor.postgres import Database, PostgresServer, find_postgres
from mailboat_harbor.postgres_binaries import NEWEST
from mailboat_harbor.proxy import Proxy
from mailboat_harbor.pubsub import PubSubServer, start_pstest
from support.cli import RunningRelay
from support.collectors import KafkaCollector, PubSubCollector
from support.inprocess_relay import events, write
from support.ledger import Written, check_delivery, payload
from support.relay_processes import Manifest, kafka_sink, outbox_relay, subscription
from support.wait import wait_until


class Desk:
    """A folder of manifests, and somebody who types commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "manifests"
        self.folder.mkdir()
        self._log = folder / "relay.log"

    def put(self, *manifests: Manifest) -> None:
        for number, manifest in enumerate(manifests):
            (self.folder / f"{number}.json").write_text(json.dumps(manifest))

    def types(self, *command: str, **environment: str) -> tuple[int, str]:
        """The exit code, and what a person sees."""
        done = subprocess.run(
            [sys.executable, "-m", "mailboat.cli.main", *command, "-f", str(self.folder)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        seen = done.stdout + done.stderr
        assert "Traceback" not in seen
        return done.returncode, seen

    @property
    def log(self) -> str:
        """What the relay wrote."""
        return self._log.read_text()

    @contextmanager
    def relay(self, *arguments: str) -> Iterator[RunningRelay]:
        """``mailboat run``, which must neither crash nor show a traceback, and must end when told to."""
        running = RunningRelay(["-f", str(self.folder), "--log-format", "json", *arguments], self._log)
        try:
            running.address()
            yield running
            assert running.stop() == 0, self.log
            assert "Traceback" not in self.log
        finally:
            if running.process.poll() is None:
                running.process.kill()
            running.process.wait()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def _status(relay: RunningRelay) -> dict[str, Any]:
    code, text = relay.get("/status")
    assert code == 200
    found: dict[str, Any] = json.loads(text)
    return found["relays"][0] if "relays" in found else found


def _says(relay: RunningRelay, *words: str) -> str:
    """Waits until the relay's status holds these words."""

    def said() -> str | None:
        text = json.dumps(_status(relay))
        return text if all(word in text for word in words) else None

    assert relay.get("/livez")[0] == 200
    return str(wait_until(said, timeout=40, what=f"the status to say {words}"))


LOG_SINK: Manifest = {"log": {"path": "/dev/null"}}


# ---- manifests and the database -------------------------------------------------------------------------------------


def test_an_unknown_field_is_named_with_the_right_one(desk: Desk, outbox: Database) -> None:
    orders = subscription("orders", LOG_SINK, delivry={"timeout": "5s"})
    desk.put(outbox_relay(outbox.url), orders)
    code, seen = desk.types("run")
    assert code == 3
    assert "1.json" in seen
    assert "spec.delivry" in seen
    assert "delivery" in seen


def test_a_missing_table_is_told_with_the_sql_that_makes_it(desk: Desk, database: Database) -> None:
    desk.put(outbox_relay(database.url, manageSchema=False), subscription("orders", LOG_SINK))
    code, seen = desk.types("verify")
    assert code == 4
    assert "mailboat migrate --sql" in seen
    assert "select mailboat.create_outbox('mailboat.outbox');" in desk.types("migrate", "--sql")[1]
    with desk.relay() as relay:
        _says(relay, "Failed", "mailboat")
        assert relay.get("/readyz")[0] == 503
        # Somebody mends it, and the relay goes on by itself.
        desk.put(outbox_relay(database.url), subscription("orders", LOG_SINK))
        assert desk.types("migrate")[0] == 0
        wait_until(lambda: relay.get("/readyz")[0] == 200, timeout=30, what="the relay to be ready")


def test_a_wrong_password_is_told_and_never_repeated(desk: Desk, outbox: Database) -> None:
    outbox.execute("create role clerk login password 'right-one' in role needs_password")
    outbox.execute("grant mailboat_relay to clerk")
    try:
        relay = outbox_relay(outbox.url, manageSchema=False)
        relay["spec"]["database"] = {"urlSecretRef": {"name": "shop-db", "key": "url"}}
        desk.put(relay, subscription("orders", LOG_SINK))
        secrets = desk.folder.parent / "secrets" / "shop-db"
        secrets.mkdir(parents=True)
        (secrets / "url").write_text(outbox.url_for("clerk", "wrong-one"))
        code, seen = desk.types("verify", "--secrets-dir", str(secrets.parent))
        assert code == 5
        assert "password" in seen
        assert "wrong-one" not in seen
        with desk.relay("--secrets-dir", str(secrets.parent)) as running:
            said = _says(running, "password")
            assert "wrong-one" not in said
            fresh = desk.folder.parent / "url.new"
            fresh.write_text(outbox.url_for("clerk", "right-one"))
            fresh.replace(secrets / "url")  # at once, as a volume is; picked up without a restart
            wait_until(lambda: _status(running)["databaseReachable"], what="the right password to be used")
        assert "wrong-one" not in desk.log
        assert "right-one" not in desk.log
    finally:
        outbox.execute("drop owned by clerk")
        outbox.execute("drop role clerk")


@pytest.mark.verify
def test_a_database_that_goes_away_for_ten_seconds_is_waited_for(
    desk: Desk, outbox: Database, kfake: KafkaServer, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("orders")
    kfake.create_topic(topic, 4)
    with Proxy("127.0.0.1", outbox.server.port) as proxy, KafkaCollector(kfake.bootstrap, topic) as collector:
        url = outbox.url.replace(f":{outbox.server.port}/", f":{proxy.port}/")
        desk.put(outbox_relay(url), subscription("orders", kafka_sink(kfake.bootstrap, topic)))
        with desk.relay() as relay:
            committed = write(outbox.url, events(100, 10))
            collector.until_all(committed)
            proxy.stop()
            committed |= write(outbox.url, events(100, 10, first=11))
            _says(relay, '"databaseReachable": false')
            deadline = 10.0
            collector.until_quiet(deadline, timeout=deadline + 10)
            assert relay.get("/livez")[0] == 200
            proxy.start()
            collector.until_all(committed, timeout=30)
        check_delivery(committed, (), collector.arrivals, kills=1)


# ---- destinations ---------------------------------------------------------------------------------------------------


def test_a_broker_that_is_not_there_at_start_is_waited_for(desk: Desk, outbox: Database, kfake: KafkaServer) -> None:
    port = free_port()
    assert kfake.running
    desk.put(outbox_relay(outbox.url), subscription("orders", kafka_sink(f"127.0.0.1:{port}", "orders")))
    committed = write(outbox.url, events(50, 5))
    with desk.relay() as relay:
        _says(relay, f"127.0.0.1:{port}", "are the brokers up")
        assert relay.get("/livez")[0] == 200
        with start_kfake(port=port) as broker:
            _says(relay, "topic orders does not exist")  # the next thing that is wrong
            broker.create_topic("orders", 2)
            with KafkaCollector(broker.bootstrap, "orders") as collector:
                collector.until_all(committed, timeout=40)
            check_delivery(committed, (), collector.arrivals)
        assert outbox.execute("select count(*) from mailboat.parked") == [(0,)]


def test_a_pubsub_that_is_not_there_at_start_is_waited_for(
    desk: Desk, outbox: Database, pubsub: PubSubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by PUBSUB_EMULATOR_HOST: the manifest names no endpoint."""
    port = free_port()
    assert pubsub.running
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", f"127.0.0.1:{port}")
    sink = {"pubsub": {"project": "faults", "topic": "orders"}}
    desk.put(outbox_relay(outbox.url), subscription("orders", sink, partitions=2))
    committed = write(outbox.url, events(50, 5))
    with desk.relay() as relay:
        _says(relay, f"127.0.0.1:{port}")
        with start_pstest(port) as server:
            _says(relay, "projects/faults/topics/orders", "does not exist")  # the next thing that is wrong
            # It makes the topic, then the subscription: what were published in between would reach nobody.
            relay.process.send_signal(signal.SIGSTOP)
            making = PubSubCollector(server.host, "orders")
            relay.process.send_signal(signal.SIGCONT)
            with making as collector:
                collector.until_all(committed, timeout=40)
                collector.until_quiet()
            check_delivery(committed, (), collector.arrivals)
        assert outbox.execute("select count(*) from mailboat.parked") == [(0,)]


# ---- events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value", "complaint"),
    [
        ("payload", lambda: b"x" * 20_000_000, "payload has 20000000 bytes, the limit is 16 MiB"),
        ("key", lambda: "k" * 1_000_000, "key has 1000000 bytes, the limit is 1024"),
        ("headers", lambda: json.dumps({"tenant": "a\x01b"}), "headers.tenant must not contain control characters"),
        ("headers", lambda: json.dumps({"ten ant": "a"}), "headers contain the name"),
    ],
    ids=["a payload of 20 MB", "a key of 1 MB", "a control character", "a header's name"],
)
def test_what_must_not_enter_the_outbox_is_refused_where_the_application_sees_it(
    outbox: Database, argument: str, value: Callable[[], object], complaint: str
) -> None:
    arguments = {"payload": b"{}", "key": "k", "headers": None, argument: value()}
    with (
        psycopg.connect(outbox.url) as connection,
        pytest.raises(psycopg.errors.InvalidParameterValue, match=complaint),
    ):
        connection.execute(
            "select mailboat.emit('order.placed', %(payload)s::bytea, key => %(key)s, headers => %(headers)s::jsonb)",
            arguments,
        )
    assert outbox.execute("select count(*) from mailboat.outbox") == [(0,)]


@pytest.mark.parametrize(
    ("column", "expression", "taken"),
    [
        ("payload", "convert_to(repeat('x', 20000000), 'UTF8')", False),
        ("payload", "convert_to(repeat('x', 16777217), 'UTF8')", False),
        ("payload", "convert_to(repeat('x', 16777216), 'UTF8')", True),
        ("key", "repeat('k', 1000000)", False),
        ("key", "repeat('k', 1025)", False),
        ("key", "repeat('ü', 513)", False),  # bytes are counted, not letters
        ("key", "repeat('ü', 512)", True),
    ],
)
def test_what_is_inserted_by_hand_has_the_same_limits(
    each_outbox: Database, column: LiteralString, expression: LiteralString, taken: bool
) -> None:
    statement = f"insert into mailboat.outbox (event_type, {column}) values ('order.placed', {expression})"
    if taken:
        each_outbox.execute(statement)
    else:
        with pytest.raises(psycopg.errors.CheckViolation, match="well_formed"):
            each_outbox.execute(statement)
    assert each_outbox.execute("select count(*) from mailboat.outbox") == [(int(taken),)]


@pytest.mark.parametrize("headers", [b'{"tenant": "a\\u0000b"}', b'{"tenant": "\xff\xfe"}'], ids=["NUL", "not UTF-8"])
def test_characters_that_are_none_never_reach_the_outbox(outbox: Database, headers: bytes) -> None:
    """Postgres itself refuses them, whatever way they come."""
    statement = b"insert into mailboat.outbox (event_type, headers) values ('order.placed', '" + headers + b"')"
    with psycopg.connect(outbox.url) as connection, pytest.raises(psycopg.DataError):
        connection.execute(statement)


def test_events_inserted_by_hand_that_nobody_can_send_are_counted_and_hold_up_nobody(
    desk: Desk, outbox: Database, kfake: KafkaServer, unique_name: Callable[[str], str]
) -> None:
    """Past mailboat.emit: only what the table itself lets in."""
    topic = unique_name("orders")
    kfake.create_topic(topic, 2)
    desk.put(outbox_relay(outbox.url), subscription("orders", kafka_sink(kfake.bootstrap, topic), partitions=2))
    bad: dict[str, tuple[bytes | None, str | None]] = {
        "half a character": (b"{}", '{"tenant": "\\ud83d"}'),
        "a number for a header": (b"{}", '{"tenant": 7}'),
        "sixteen megabytes": (b"x" * 16_000_000, None),
    }
    committed = write(outbox.url, events(20, 2))
    refused: list[str] = []
    with psycopg.connect(outbox.url, autocommit=True) as connection:
        for content, headers in bad.values():
            event_id = str(uuid.uuid4())
            try:
                connection.execute(
                    "insert into mailboat.outbox (event_id, event_type, key, payload, headers)"
                    " values (%s, 'order.placed', 'key 0', %s, %s)",
                    [event_id, content, headers],
                )
                refused.append(event_id)
            except psycopg.DataError:
                assert headers is not None  # jsonb knows that half a character is none
    assert len(refused) == 2
    later = [Written(str(uuid.uuid4()), key, 11, payload(key, 11)) for key in ("key 0", "key 1")]
    committed |= write(outbox.url, later)
    with desk.relay() as relay, KafkaCollector(kfake.bootstrap, topic) as collector:
        collector.until_all(committed, timeout=40)
        wait_until(
            lambda: outbox.execute("select count(*) from mailboat.dead_letters") == [(2,)], what="two dead letters"
        )
        check_delivery(committed, (), collector.arrivals, gapless=False)
        wait_until(lambda: '"dead": 2' in json.dumps(_status(relay)), what="the status to count them")
        code, seen = desk.types("dlq", "list")
        assert code == 0
        assert all(reason in seen for reason in ("InvalidHeaders", "TooLarge"))


# ---- a restored dump ------------------------------------------------------------------------------------------------


def test_a_restored_dump_is_refused_until_a_person_says_rebase(
    desk: Desk,
    outbox: Database,
    kfake: KafkaServer,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    or_skip: Callable[[Callable[[], PostgresServer]], PostgresServer],
) -> None:
    topic = unique_name("orders")
    kfake.create_topic(topic, 2)
    orders = subscription("orders", kafka_sink(kfake.bootstrap, topic), partitions=2)
    desk.put(outbox_relay(outbox.url), orders)
    committed = write(outbox.url, events(20, 2))
    with KafkaCollector(kfake.bootstrap, topic) as collector:
        with desk.relay():
            collector.until_all(committed, timeout=40)
        committed |= write(outbox.url, events(20, 2, first=11))  # the old database is lost with these undelivered
        start = lambda: PostgresServer.start(find_postgres(NEWEST), tmp_path / "elsewhere")  # noqa: E731
        with or_skip(start) as elsewhere:
            elsewhere.create_database(outbox.name, template="template0")
            for role in ("mailboat_writer", "mailboat_relay"):
                elsewhere.execute(f"create role {role} nologin")
            copy = Database(elsewhere, outbox.name)
            tool, env = elsewhere.binaries.tool, dict(elsewhere.binaries.env)
            dump = subprocess.run([tool("pg_dump"), outbox.url], env=env, capture_output=True, check=True)
            psql = [tool("psql"), "-q", "-v", "ON_ERROR_STOP=1", copy.url]
            subprocess.run(psql, env=env, input=dump.stdout, capture_output=True, check=True)
            desk.put(outbox_relay(copy.url), orders)
            with desk.relay() as relay:
                _says(relay, "restored copy", "mailboat rebase")
                assert relay.get("/readyz")[0] == 503
                code, seen = desk.types("rebase")
                assert code == 3
                assert "--yes" in seen
                code, seen = desk.types("rebase", "--yes")
                assert code == 0, seen
                collector.until_all(committed, timeout=40)
        check_delivery(committed, (), collector.arrivals)
