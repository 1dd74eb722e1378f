"""A Postgres that can crash, be cloned and be promoted, and that tells the truth about what survived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from mailboat_harbor.missing import PartMissing
from mailboat_harbor.pgbouncer import PgBouncer, start_pgbouncer
from mailboat_harbor.postgres import Database, PostgresServer, find_postgres
from support.lost_tail import NEVER_FLUSHED, hold_the_log_writer
from support.wait import wait_until


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[PostgresServer]:
    with PostgresServer.start(find_postgres(), tmp_path / "primary") as server:
        yield server


def test_each_test_gets_an_empty_database(each_database: Database) -> None:
    tables = each_database.execute("select count(*) from pg_class where relnamespace = 'public'::regnamespace")
    assert tables == [(0,)]
    assert each_database.execute("show server_encoding") == [("UTF8",)]


def test_both_majors_are_what_they_say(postgres: PostgresServer, postgres14: PostgresServer) -> None:
    for server in (postgres, postgres14):
        assert server.execute("select current_setting('server_version_num')::int / 10000") == [(server.binaries.major,)]


def test_a_database_is_dropped_under_a_connected_client(postgres: PostgresServer) -> None:
    postgres.create_database("doomed")
    with psycopg.connect(postgres.url("doomed"), autocommit=True) as client:
        postgres.drop_database("doomed")
        with pytest.raises(psycopg.OperationalError):
            client.execute("select 1")


def test_a_database_can_be_copied(postgres: PostgresServer, database: Database) -> None:
    database.execute("create table kept as select 1 as one")
    postgres.create_database("the copy", template=database.name)
    assert postgres.execute("select one from kept", "the copy") == [(1,)]
    postgres.drop_database("the copy")


def test_a_role_can_be_made_to_need_its_password(postgres: PostgresServer, database: Database) -> None:
    postgres.execute("create role careful login password 'right' in role needs_password")
    psycopg.connect(database.url_for("careful", "right")).close()
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(database.url_for("careful", "wrong"))
    postgres.execute("drop role careful")


def test_settings_are_taken(tmp_path: Path) -> None:
    settings = {"max_prepared_transactions": "7", "application_name": "it's quoted"}
    with PostgresServer.start(find_postgres(), tmp_path / "pg", settings=settings) as server:
        assert server.execute("show max_prepared_transactions") == [("7",)]
        assert server.execute("show max_connections") == [("200",)]
        assert server.execute("show fsync") == [("on",)], "tests of crashes depend on it"


def test_a_crash_keeps_flushed_commits_and_loses_the_asynchronous_tail(tmp_path: Path) -> None:
    with PostgresServer.start(find_postgres(), tmp_path / "primary", settings=NEVER_FLUSHED) as server:
        server.execute("create table t (how text)")
        port = server.port
        hold_the_log_writer(server)
        with psycopg.connect(server.url(), autocommit=True) as client:
            client.execute("insert into t values ('flushed')")
            client.execute("set synchronous_commit = off")
            for _ in range(200):
                client.execute("insert into t values ('asynchronous')")
            server.kill()
        server.restart()
        assert server.port == port
        survived = dict(server.execute("select how, count(*) from t group by how"))
    assert survived["flushed"] == 1
    assert survived.get("asynchronous", 0) < 200


def test_a_standby_falls_behind_on_request_and_becomes_a_primary(own_postgres: PostgresServer, tmp_path: Path) -> None:
    own_postgres.execute("create table t (i int)")
    with own_postgres.clone_standby(tmp_path / "standby") as standby:
        own_postgres.execute("insert into t values (1)")
        wait_until(lambda: standby.execute("select i from t") == [(1,)], what="the standby to follow")
        standby.pause_replay()
        own_postgres.execute("insert into t values (2)")
        assert standby.execute("select i from t") == [(1,)]
        own_postgres.kill()
        standby.resume_replay()
        standby.promote()
        standby.execute("insert into t values (3)")
        assert standby.execute("select pg_is_in_recovery()") == [(False,)]


def test_a_standby_needs_tools_that_the_oldest_major_does_not_bring(postgres14: PostgresServer, tmp_path: Path) -> None:
    with pytest.raises(PartMissing, match="no pg_basebackup: use Postgres 18"):
        postgres14.clone_standby(tmp_path / "standby")


def test_an_unknown_major_says_which_are_known() -> None:
    with pytest.raises(PartMissing, match=r"Postgres 9 is not known here; there are 14, 18"):
        find_postgres(9)


def test_a_pooler_in_transaction_mode_shares_sessions(
    postgres: PostgresServer, database: Database, tmp_path: Path, or_skip: Callable[..., PgBouncer]
) -> None:
    with or_skip(lambda: start_pgbouncer(tmp_path / "pooler", postgres)) as pooler:
        url = pooler.url(database.name)
        with psycopg.connect(url, prepare_threshold=None) as one, psycopg.connect(url, prepare_threshold=None) as other:
            backends = []
            for client in (one, other):
                backends.append(client.execute("select pg_backend_pid()").fetchone())
                client.commit()
            assert backends[0] == backends[1]
        with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter"):
            psycopg.connect(url, options="-c statement_timeout=1000")
