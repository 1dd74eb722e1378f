"""Wrong input of any kind: one clear message, a specific exit code, no traceback, no secret."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import sql

from mailboat.cli.main import exit_code
from mailboat.errors import ConfigError, DatabaseUnavailable, EmitRefused, MailboatError, SchemaMismatch
from mailboat_devservers.ports import free_port
from support.cli import Place, make_known, relay_manifest, subscription_manifest


def refused(place: Place, code: int, *arguments: str) -> str:
    """Run a command that must fail with this exit code, and return its message."""
    result = place.mailboat(*arguments)
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}"
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def url_in_secret(place: Place, url: str) -> None:
    """Give the relay the URL of its database by a Secret."""
    manifest = relay_manifest("")
    manifest["spec"]["database"] = {"urlSecretRef": {"name": "orders-db", "key": "url"}}
    place.write(manifest, subscription_manifest())
    place.environment["MAILBOAT_SECRET_ORDERS_DB_URL"] = url


@pytest.mark.parametrize(
    ("error", "code"),
    [(MailboatError(), 1), (ConfigError(), 3), (EmitRefused(), 3), (SchemaMismatch(), 4), (DatabaseUnavailable(), 5)],
)
def test_each_kind_of_error_has_an_exit_code(error, code):
    assert exit_code(error) == code


def test_a_path_that_is_not_there_is_named(place):
    result = place.mailboat("status", "-f", "nowhere.yaml", manifests=False)
    assert result.exit_code == 3
    assert "nowhere.yaml does not exist" in result.stderr


def test_a_database_without_a_schema_is_reported_with_the_remedy(empty_place):
    assert "Run `mailboat migrate`" in refused(empty_place, 4, "status")
    assert "Run `mailboat migrate`" in refused(empty_place, 4, "dlq", "list")
    assert "Run `mailboat migrate`" in refused(empty_place, 4, "emit", "order.placed", "{}")


def test_a_missing_table_is_named(place):
    place.database.execute("drop table mailboat.dead_letters cascade")
    assert 'relation "mailboat.dead_letters" does not exist' in refused(place, 4, "dlq", "list")


def test_a_wrong_password_is_reported_without_its_value(place):
    place.database.server.execute("create role careless login password 'right' in role needs_password")
    try:
        url_in_secret(place, place.database.url_for("careless", "hunter2"))
        message = refused(place, 5, "status")
    finally:
        place.database.server.execute("drop role careless")
    assert message.startswith("mailboat: OutboxRelay shop/orders (Secret orders-db, key url): ")
    assert 'password authentication failed for user "careless"' in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("postgresql+psycopg://me:hunter2@db/shop", "is a URL of SQLAlchemy. Leave out +psycopg: postgresql://"),
        ("jdbc:postgresql://db/shop?user=me&password=hunter2", "is a URL of JDBC. Write it without jdbc:"),
        ("mysql://me:hunter2@db/shop", "begins with mysql://, and Mailboat works on PostgreSQL"),
    ],
)
def test_a_url_of_another_library_is_reported_with_secret_and_key(place, url, remedy):
    url_in_secret(place, url)
    message = refused(place, 3, "status")
    assert f"OutboxRelay shop/orders: spec.database.urlSecretRef: key url of secret orders-db {remedy}" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("command", ["status", "run"])
def test_a_missing_secrets_folder_is_reported(place, tmp_path, command):
    message = refused(place, 3, command, "--secrets-dir", str(tmp_path / "secret"))
    assert message == (
        f"mailboat: --secrets-dir: there is no folder {tmp_path}/secret."
        " Create it, or name the one that has the secrets.\n"
    )


@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize("command", ["status", "run"])
def test_an_empty_url_is_not_taken_for_the_server_of_this_machine(place, command, blank):
    url_in_secret(place, blank)
    listen = ("--listen", "127.0.0.1:0") if command == "run" else ()
    message = refused(place, 3, command, *listen).splitlines()[-1]
    assert message == (
        "mailboat: OutboxRelay shop/orders: spec.database.urlSecretRef: key url of secret orders-db is empty. Write the"
        " database's URL into it: postgresql://user:***@host:5432/dbname"
    )


@pytest.mark.parametrize("command", [("status",), ("migrate",), ("verify",), ("dlq", "list"), ("pause", "to-log")])
def test_a_missing_database_is_reported(place, command):
    place.write(relay_manifest(f"postgresql://postgres@127.0.0.1:{free_port()}/x"), subscription_manifest())
    message = refused(place, 5, *command)
    assert message.startswith("mailboat: OutboxRelay shop/orders (spec.database.url): ")
    assert "connection refused" in message.lower()
    assert message.endswith(
        "\nCheck that the server runs and can be reached from here, and the host, port, user and password of the URL.\n"
    )


def test_a_restored_dump_is_rebased_only_on_request(place):
    asyncio.run(make_known(place.database, subscription_manifest()))
    place.database.execute("update mailboat.cursors set system_identifier = 4711")
    assert "say --yes" in refused(place, 3, "rebase")
    assert place.ok("rebase", "--yes") == "shop/orders: 2 cursors rebased\n"
    assert place.ok("rebase", "--yes") == "shop/orders: all cursors are of this database already\n"


def test_an_unknown_subscription_is_reported_with_the_known_ones(place):
    asyncio.run(make_known(place.database, subscription_manifest()))
    message = refused(place, 3, "pause", "to-lag")
    assert message == "mailboat: the database knows no subscription to-lag. It knows: shop/to-log.\n"


@pytest.mark.parametrize(
    "command", ["dlq list", "dlq replay", "dlq purge --yes", "parked list", "parked retry", "parked drop"]
)
def test_a_filter_by_an_unknown_subscription_is_reported(place, command):
    asyncio.run(make_known(place.database, subscription_manifest()))
    message = refused(place, 3, *command.split(), "--subscription", "to-lag")
    assert message == "mailboat: the database knows no subscription to-lag. It knows: shop/to-log.\n"


def test_a_subscription_that_no_relay_has_run_yet_is_known(place):
    assert place.ok("dlq", "replay", "--subscription", "to-log") == "0 dead letters replayed\n"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("dlq replay", "there is no dead letter 4711."),
        ("dlq replay --dry-run", "there is no dead letter 4711."),
        ("dlq purge --yes", "there is no dead letter 4711."),
        ("parked retry", "no event 4711 is parked."),
        ("parked drop --yes", "no event 4711 is parked."),
    ],
)
def test_an_unknown_id_is_reported(place, command, complaint):
    assert complaint in refused(place, 3, *command.split(), "--id", "4711")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("dlq", "replay"), "say which ones"),
        (("parked", "retry"), "say which ones"),
        (("parked", "drop"), "say which ones"),
        (("dlq", "purge", "--limit", "1", "--yes"), "say which ones"),
        (("dlq", "list", "--since", "yesterday"), "write a time like 2026-01-31T12:00:00Z"),
        (("dlq", "list", "--since", "2d"), 'write "48h"'),
        (("dlq", "list", "--id", "abc"), "neither a number nor an event's id"),
        (("dlq", "list", "--type", "order.[ab]"), "character classes"),
        (("dlq", "purge", "--older-than", "5"), 'write "5s"'),
        (("emit", "order.placed", "{}", "--header", "x"), "NAME=VALUE"),
        (("status", "--url", "localhost"), "either -f or --url"),
    ],
)
def test_wrong_usage_is_reported(place, arguments, complaint):
    result = place.mailboat(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("t", "{"), "PAYLOAD: is not JSON: say --content-type text/plain for other text"),
        (("", "{}"), "TYPE: must not be empty"),
        (("t", "{}", "--key", ""), "--key: must not be empty: leave it out"),
        (("t", "{}", "--aggregate-id", ""), "--aggregate-id: must have 1 to 1024 bytes"),
        (("t", "{}", "--content-type", "x"), "--content-type: must be a media type such as application/json"),
        (("t", "{}", "--tag", ""), "--tag: must each have 1 to 128 characters and no control characters"),
        (("t", "{}", "--header", "ce_id=1"), "--header: can't have the name ce_id, which Mailboat sets itself"),
        (("t", "{}", "--header", "a=\t"), "--header a: must not contain control characters"),
    ],
)
def test_a_refused_event_is_reported_with_the_names_of_the_options(place, arguments, complaint):
    assert refused(place, 3, "emit", *arguments) == f"mailboat: {complaint}\n"
    assert place.database.execute("select count(*) from mailboat.outbox") == [(0,)]


def test_an_unknown_outbox_is_reported_with_the_known_ones(place):
    message = refused(place, 3, "emit", "t", "{}", "--relay", "nobody")
    assert message == "mailboat: there is no OutboxRelay nobody; the manifests have: shop/orders.\n"


def test_the_file_of_public_keys_has_to_be_there(place, tmp_path):
    missing = tmp_path / "missing"
    message = refused(place, 3, "run", "--control-keys", str(missing), "--audience", "me")
    assert message.startswith(f"mailboat: --control-keys: {missing} is no file. Write the ")


def test_a_bug_is_not_thrown_at_the_user(place, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("postgresql://me:hunter2@host/db")

    monkeypatch.setattr("mailboat.cli.options.outboxes_of", broken)
    message = refused(place, 1, "status")
    assert "This is a bug in Mailboat" in message
    assert "hunter2" not in message
    debugged = place.mailboat("--debug", "status")
    assert "Traceback" in debugged.stderr
    assert "hunter2" not in debugged.stderr


def test_control_characters_of_a_server_do_not_reach_the_terminal(place):
    hostile = sql.SQL("alter table mailboat.dead_letters rename column last_error to {}").format(
        sql.Identifier("last_error\x1b[31m")
    )
    place.database.execute(hostile)
    assert "\x1b" not in refused(place, 4, "dlq", "list")
