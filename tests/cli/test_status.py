"""``mailboat status``: the output with and without relays. The lag is correct (G7)."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from psycopg import sql
from rich.console import Console

from mailboat.cli.main import main
from mailboat.cli.status import coloured
from mailboat.cli.status_rows import (
    HEADER,
    StatusLine,
    details_text,
    enriched,
    from_consumers,
    from_relays,
    overview_text,
)
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres import Database
from mailboat_spec.consumer_report import ConsumerReport, SourceHealth
from mailboat_spec.relay_status import as_json
from support.cli import Place, RunningRelay, make_known, relay_manifest, subscription_manifest
from support.manifests import event_subscription
from support.relay_statuses import partition, relay, subscription
from support.terminal import CTRL_C, HIDE_CURSOR, SHOW_CURSOR, Terminal
from support.wait import wait_until


def test_without_a_relay_the_status_comes_from_the_database(place: Place):
    asyncio.run(make_known(place.database, subscription_manifest()))
    for number in range(3):
        place.ok("emit", "order.placed", "{}", "--key", str(number))
    header, line = place.ok("status").splitlines()
    assert header.split("  ")[0] == "READY"
    ready, name, sink, partitions, lag, oldest, parked, dead, rate = line.split()
    assert (ready, name, sink, partitions) == ("False", "shop/to-log", "log", "0/2")
    assert (lag, parked, dead, rate) == ("3", "0", "0", "-")
    assert oldest.endswith("s")


def test_in_the_container_of_a_relay_no_command_needs_options(place: Place):
    place.environment = {"MAILBOAT_MANIFESTS": str(place.folder)}
    asyncio.run(make_known(place.database, subscription_manifest()))
    assert place.mailboat("emit", "order.placed", "{}", manifests=False).exit_code == 0
    assert "shop/to-log" in place.mailboat("status", manifests=False).stdout
    assert place.mailboat("dlq", "list", manifests=False).exit_code == 0
    asked = place.mailboat("status", "--url", "http://127.0.0.1:9", manifests=False)
    assert "no status from http://127.0.0.1:9" in asked.stderr, "--url counts, though the variable is set"


def test_the_lag_respects_the_filter(place: Place):
    manifest = subscription_manifest(filter={"eventTypes": ["order.*"]})
    place.write(*[*_relay_of(place), manifest])
    asyncio.run(make_known(place.database, manifest))
    place.ok("emit", "order.placed", "{}")
    place.ok("emit", "invoice.sent", "{}")
    assert json.loads(place.ok("status", "--json"))["subscriptions"][0]["lag"] == 1


def _relay_of(place: Place):
    documents = yaml.safe_load_all((place.folder / "manifests.yaml").read_text())
    return [document for document in documents if document["kind"] == "OutboxRelay"]


def test_a_manifest_that_no_relay_has_run_yet_is_shown(place: Place):
    _, line, *_, error = place.ok("status").splitlines()
    assert line.split() == ["False", "shop/to-log", "log", "0/2", "-", "-", "-", "-", "-"]
    assert error.split(maxsplit=2) == ["shop/to-log", "-", "no relay has run it yet"]


def test_with_a_relay_its_reports_are_shown_too(place: Place, start_relay):
    running: RunningRelay = start_relay("-f", str(place.folder), "--relay-id", "r1")
    running.wait_ready()

    def line() -> list[str]:
        return place.ok("status").splitlines()[1].split()

    # The rate is unknown until the relay responds in time.
    cells = wait_until(line, what="the relay's word", met=lambda cells: cells[0] == "True" and cells[8] != "-")
    assert (cells[3], cells[8]) == ("2/2", "0.0/s")
    assert place.ok("status").splitlines()[-1] == "relays: r1 (2 partitions)"
    assert "owners  r1: 0, 1" in place.ok("status", "to-log").splitlines()
    place.ok("emit", "order.placed", "{}")
    assert place.ok("status", "--wait", "--timeout", "60s", "--interval", "0.1").splitlines()[1].split()[4:7:2] == [
        "0",
        "0",
    ]

    def by_url() -> Result:
        return place.mailboat("status", "--url", running.address(), manifests=False)

    def relays() -> list[str]:
        return [each["relay"] for each in json.loads(place.ok("status", "--json"))["relays"]]

    told = wait_until(by_url, what="the relay's word at its address", met=lambda told: told.exit_code == 0)
    assert told.stdout.splitlines()[1].split()[:4] == ["True", "shop/to-log", "log", "2/2"]
    assert wait_until(relays, what="the relay's word in JSON") == ["r1"]


def test_on_a_terminal_it_is_watched_until_ctrl_c(place: Place):
    """The command survives an outage of the database and restores the terminal."""
    command = [sys.executable, "-m", "mailboat.cli.main"]
    command += ["status", "-f", str(place.folder), "--watch", "--interval", "0.1"]
    with Terminal(command, os.environ) as terminal:
        wait_until(lambda: terminal.text, 60, "some frames", met=lambda text: text.count("shop/to-log") > 2)
        assert "no relay has run it yet" in terminal.text
        _let_in(place.database, False)
        wait_until(lambda: terminal.text, what="the trouble to be told", met=lambda text: "currently accepting" in text)
        frames = terminal.text.count("shop/to-log")
        _let_in(place.database, True)
        wait_until(lambda: terminal.text.count("shop/to-log") > frames, what="the table again")
        terminal.press(CTRL_C)
        assert terminal.wait(60) == 0, terminal.text
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR) >= 0
    assert "Traceback" not in terminal.text


def _let_in(database: Database, yes: bool) -> None:
    statement = sql.SQL("alter database {} allow_connections {}").format(
        sql.Identifier(database.name), sql.Literal(yes)
    )
    database.server.execute(statement, "postgres")


def test_relays_that_do_not_answer_are_reported(place: Place):
    result = place.mailboat("status", "--url", "http://127.0.0.1:9", manifests=False)
    assert result.exit_code == 5
    assert "no status from http://127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("url", ["ftp://x", "http://:80"])
def test_an_invalid_relay_address_is_reported(place: Place, url: str):
    result = place.mailboat("status", "--url", url, manifests=False)
    assert f"no status from {url}: that is no address: write http://host:port" in result.stderr


def test_an_unavailable_database_does_not_hide_the_others(place: Place):
    away = relay_manifest(f"postgresql://postgres@127.0.0.1:{free_port()}/x")
    away["metadata"]["name"] = "away"
    place.write(away, name="away.yaml")
    result = place.mailboat("status")
    _, line, *_, remark = result.stdout.splitlines()
    assert line.split()[1] == "shop/to-log"
    assert remark.startswith("OutboxRelay shop/away (spec.database.url): ")
    assert (result.exit_code, result.stderr) == (5, "mailboat: 1 of 2 databases could not be asked.\n")
    document = json.loads(place.mailboat("status", "--json").stdout)
    assert (document["remarks"], len(document["subscriptions"])) == ([remark], 1)


# ---- lines --------------------------------------------------------------------------------------------------------


def documents(*subscriptions_of_relays):
    return [as_json(relay(subscriptions=(each,))) for each in subscriptions_of_relays]


def test_partitions_of_relays_are_summed():
    (line,) = from_relays(
        documents(
            subscription(),
            subscription(owned=(partition(2), partition(3)), lag=100_000, lag_bounded=True, oldest_age=90.0, rate=1.0),
        )
    )
    assert line.cells() == ("True", "shop/orders-to-kafka", "kafka", "4/4", "100004+", "1m30s", "4", "1", "14/s")
    assert len(line.cells()) == len(HEADER)


@pytest.mark.parametrize(
    ("changes", "ready"),
    [
        ({}, "True"),
        ({"owners": {0: "a", 1: "a", 2: "b"}}, "False"),
        ({"owners": {}, "sink": "pull"}, "True"),
        ({"sink_reachable": False}, "False"),
        ({"sink_reachable": None}, "True"),
        ({"state": "Paused"}, "Paused"),
        ({"state": "Failed"}, "Failed"),
        ({"state": "Deleted"}, "Deleted"),
    ],
)
def test_readiness_of_a_status_line(changes, ready):
    owners = {0: "a", 1: "a", 2: "b", 3: "b"}
    plain = StatusLine("a/b", "log", "Running", 4, owners, lag=0, parked=0, dead=0, rate=0.0, sink_reachable=True)
    assert replace(plain, **changes).ready_text == ready


def test_a_relay_without_partitions_does_not_report_the_sink():
    (line,) = from_relays(documents(subscription(), subscription(owned=(), sink_reachable=False)))
    assert line.sink_reachable is True


def test_a_subscription_is_failed_only_if_no_relay_can_run_it():
    lacking = subscription(state="Failed", owned=(), sink_reachable=False, last_error="secret kafka was not found")
    (line,) = from_relays(documents(lacking, lacking))
    assert (line.ready_text, line.last_error) == ("Failed", "secret kafka was not found")
    (line,) = from_relays(documents(lacking, subscription(owned=tuple(map(partition, range(4))))))
    assert (line.ready_text, line.last_error) == ("True", "secret kafka was not found")
    told = from_relays(documents(lacking))
    plain = StatusLine("shop/orders-to-kafka", None, "Running", 4, {}, lag=7)
    assert enriched(plain, told[0]).ready_text == "Failed"


def test_the_overview_fits_80_columns_and_the_details_have_the_whole_error():
    error = "broken\n\x1b[31m" + "x" * 200
    (line,) = from_relays(documents(subscription(last_error=error, last_error_age=192.0)))
    text = overview_text([line, replace(line, name="shop/gone", orphaned=True, last_error=None)], 80)
    assert max(map(len, text)) <= 80
    name, age, shown = text[-4].split(maxsplit=2)
    assert (name, age) == ("shop/orders-to-kafka", "3m12s")
    assert shown.startswith("broken \\x1b[31mxxx")
    assert shown.endswith("...")
    assert text[-2:] == [
        "shop/gone: no relay has it: mailboat forget shop/gone",
        "relays: a (4 partitions)",
    ]
    details = details_text(line)
    assert "owners      a: 0, 1; no owner: 2, 3" in details
    assert details[-1] == "last error  broken\\x0a\\x1b[31m" + "x" * 200 + " (3m12s ago)"


def test_lag_comes_from_the_database_and_the_rest_from_relays():
    plain = StatusLine("shop/orders-to-kafka", None, "Running", 4, {}, lag=7)
    (told,) = from_relays(documents(subscription(last_error="no broker", sink_reachable=False)))
    line = enriched(plain, told)
    assert (line.lag, line.rate, line.sink, line.last_error, line.ready) == (7, 12.5, "kafka", "no broker", False)
    assert enriched(plain, None).rate is None


def test_on_a_terminal_the_readiness_is_coloured_and_nothing_is_markup():
    (line,) = from_relays(documents(subscription(last_error="no broker [red]")))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=80)
    console.print(coloured(overview_text([line], 80)))
    assert "\x1b[31mFalse\x1b[0m" in screen.getvalue()  # two of its four partitions have no owner
    assert "no broker [red]" in screen.getvalue()


def test_consumers_are_shown_beside_relays(tmp_path: Path):
    """Consumers with a source report their own partitions. Consumers that pull report the whole subscription."""
    behind = ConsumerReport(name="shop/billing", state="Running", lag=5, dead=1, source=SourceHealth(owned=2))
    away = behind.model_copy(update={"source": SourceHealth(owned=1, reachable=False), "message": "no broker"})
    pulling = ConsumerReport(name="shop/view", state="Running", lag=5, dead=1)
    billing, view = from_consumers([behind, away, pulling, pulling])
    assert billing.cells() == ("False", "shop/billing", "pull", "3/3", "10", "-", "0", "2", "-")
    assert (billing.last_error, view.last_error) == ("no broker", None)
    assert view.cells() == ("True", "shop/view", "pull", "0/0", "5", "-", "0", "1", "-")
    source = {"kafka": {"bootstrapServers": ["kafka:9092"], "topic": "orders"}}
    body = event_subscription("billing", {"pull": {}}, source=source)
    del body["spec"]["relayRef"]
    path = tmp_path / "billing.yaml"
    path.write_text(yaml.safe_dump(body))
    remark = "shop/billing reads kafka/orders: its consumers run in the application"
    for arguments in (["status"], ["status", "billing"]):
        assert remark in CliRunner().invoke(main, [*arguments, "-f", str(path)]).output
    checked = CliRunner().invoke(main, ["check", "-f", "-"], input=path.read_text())
    assert (checked.exit_code, checked.output) == (0, "EventSubscription shop/billing: ok\n")


def test_scripts_wait_for_delivery_or_get_an_exit_code(place: Place):
    asyncio.run(make_known(place.database, subscription_manifest()))
    result = place.mailboat("status", "--wait", "--timeout", "0s")
    assert (result.exit_code, result.stdout.splitlines()[1].split()[0]) == (1, "False")
    assert result.stderr == "mailboat: after 0s not ready, or with events that wait: shop/to-log.\n"


def test_a_subscription_that_no_relay_serves_is_reported(place: Place):
    asyncio.run(make_known(place.database, subscription_manifest("gone")))
    assert place.ok("status").splitlines()[-1].endswith("no relay has it: mailboat forget shop/gone")
    (gone, _) = json.loads(place.ok("status", "--json"))["subscriptions"]
    assert (gone["name"], gone["orphaned"], gone["owners"]) == ("shop/gone", True, {})
    assert "It knows: shop/gone, shop/to-log" in place.mailboat("status", "nothing").stderr
