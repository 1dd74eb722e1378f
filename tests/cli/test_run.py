"""``mailboat run`` as a process: signals, HTTP endpoints and exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mailboat.cli.run import Process
from mailboat.http.auth import CallerAuth
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import find_secrets
from mailboat_devservers.proxy import Proxy
from support.cli import Operator, Place, RunningRelay, relay_manifest, subscription_manifest
from support.kubelet_volumes import Volume
from support.wait import wait_until


@pytest.fixture
def arrived(place: Place, tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Events in the file of subscription shop/to-log."""
    file = tmp_path / "arrived.jsonl"
    file.touch()
    place.write(relay_manifest(place.database.url), subscription_manifest(sink={"log": {"path": str(file)}}))
    return lambda: [json.loads(line) for line in file.read_text().splitlines()]


def test_events_arrive_and_sigterm_ends_it_in_good_order(place, arrived, start_relay):
    relay: RunningRelay = start_relay("-f", str(place.folder), "--relay-id", "r1")
    relay.wait_ready()
    assert relay.get("/livez") == (200, "ok\n")
    place.ok("emit", "order.placed", '{"n": 1}', "--key", "k")
    wait_until(lambda: len(arrived()) == 1, what="the event to arrive")
    assert "mailboat_published_total" in relay.get("/metrics")[1]

    assert relay.stop() == 0
    assert place.database.execute("select count(*) from mailboat.relays") == [(0,)]
    assert place.database.execute("select count(*) from mailboat.cursors where owner is not null") == [(0,)]
    assert relay.lines()[-1]["message"] == "Stopped."


def test_pause_stops_delivery_and_resume_continues_it(place, arrived, start_relay):
    relay: RunningRelay = start_relay("-f", str(place.folder))
    relay.wait_ready()
    assert place.ok("pause", "to-log", "--reason", "maintenance").startswith("shop/to-log is paused")

    def told(state: str) -> bool:
        (subscription,) = json.loads(relay.get("/status")[1])["relays"][0]["subscriptions"]
        return bool(subscription["state"] == state)

    wait_until(lambda: told("Paused"), what="the relay to notice the pause")
    place.ok("emit", "order.placed", "{}", "--key", "k")
    line = place.ok("status").splitlines()[1].split()
    assert (line[0], line[1], line[4]) == ("Paused", "shop/to-log", "1")
    assert arrived() == []
    assert place.ok("resume", "shop/to-log").startswith("shop/to-log is running")
    wait_until(lambda: len(arrived()) == 1, what="the event to arrive")
    assert place.ok("resume", "to-log") == "shop/to-log was running already\n"


def test_a_subscription_that_a_relay_serves_is_not_forgotten(place, arrived, start_relay):
    relay: RunningRelay = start_relay("-f", str(place.folder), "--relay-id", "r1")
    relay.wait_ready()
    refused = place.mailboat("forget", "to-log", "--yes")
    assert (refused.exit_code, "shop/to-log is served by r1" in refused.stderr) == (3, True)
    relay.stop()
    assert "say --yes" in place.mailboat("forget", "to-log").stderr
    assert place.ok("forget", "to-log", "--yes") == "shop/to-log is forgotten\n"
    assert place.database.execute("select count(*) from mailboat.cursors") == [(0,)]


@pytest.mark.verify
def test_a_database_that_is_not_there_at_start_is_waited_for(place, arrived, start_relay, proxy_factory):
    proxy: Proxy = proxy_factory(place.database.server.port)
    proxy.stop()
    url = place.database.url.replace(f":{place.database.server.port}/", f":{proxy.port}/")
    manifest = place.folder / "manifests.yaml"
    manifest.write_text(manifest.read_text().replace(place.database.url, url))
    relay: RunningRelay = start_relay("-f", str(place.folder))
    assert relay.get("/livez") == (200, "ok\n")
    wait_until(
        lambda: any(line["message"].startswith("Not connected: ") for line in relay.lines()),
        timeout=60,
        what="the relay to say that the database is away",
    )
    status, text = relay.get("/readyz")
    assert (status, text.startswith("shop/orders: Connecting: ")) == (503, True)
    proxy.start()
    relay.wait_ready()
    assert relay.stop() == 0


def test_a_relay_waits_for_an_external_migration_and_reports_it(empty_place, start_relay):
    empty_place.write(relay_manifest(empty_place.database.url, manageSchema=False), subscription_manifest())
    relay: RunningRelay = start_relay("-f", str(empty_place.folder))
    wait_until(lambda: relay.get("/readyz")[1].startswith("shop/orders: Failed: "), what="the relay to complain")
    assert relay.get("/livez")[0] == 200
    assert relay.stop() == 0


async def test_a_secret_that_is_swapped_while_relays_are_made_is_taken_up(tmp_path):
    login = Volume(tmp_path / "kafka-login")
    login.fill({"sasl.password": "old"})
    told = asyncio.Event()
    secrets = find_secrets(tmp_path, {})
    async with aclosing(Process((), tmp_path, secrets, "r1", ("127.0.0.1", 0), CallerAuth())) as process:
        # A stub of a relay that has read the old secret already.
        process.relays.append(cast(Relay, SimpleNamespace(name="shop/orders", refresh=told.set)))
        version = login.fill({"sasl.password": "new"})
        async with process.serving(None):
            assert not told.is_set(), "before it runs, a relay forgets it"
            async with asyncio.timeout(60):
                await told.wait()
        assert process.secret_versions == {"kafka-login": version}


def test_a_second_signal_ends_it_at_once(place, tmp_path, start_relay):
    relay: RunningRelay = start_relay("-f", str(place.folder))
    relay.wait_ready()
    relay.process.send_signal(signal.SIGSTOP)  # both signals are pending before the relay handles the first
    relay.process.send_signal(signal.SIGINT)
    relay.process.send_signal(signal.SIGTERM)
    relay.process.send_signal(signal.SIGCONT)
    assert relay.process.wait(timeout=60) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--listen", "nonsense"), "write host:port"),
    ],
)
def test_a_usage_error_ends_the_relay_with_a_message(place, arguments, complaint):
    result = place.mailboat("run", *arguments)
    assert result.exit_code == 3
    assert complaint in result.stderr
    assert "Traceback" not in result.output


def test_an_assignment_over_http_needs_the_signature_and_a_generation_that_is_not_older(
    place, arrived, start_relay, tmp_path
):
    operator, keys = Operator("relay-0"), tmp_path / "keys.pem"
    keys.write_text(operator.public_keys)
    relay: RunningRelay = start_relay("-f", str(place.folder), "--control-keys", str(keys), "--audience", "relay-0")
    relay.wait_ready()

    def put(generation: int, signer: Operator) -> int:
        body = json.dumps({"generation": generation, "subscriptions": {"shop/to-log": {"0": "r7"}}}).encode()
        return relay.put("/assignment", body, signer.sign("PUT", "/assignment", body))[0]

    assert put(5, Operator("relay-0")) == 401
    assert put(5, operator) == 200
    assert put(5, operator) == 200  # an operator sends the same assignment to every relay
    assert put(4, operator) == 409
    assert place.database.execute("select assigned_to from mailboat.cursors where partition = 0") == [("r7",)]


def test_two_relays_of_one_process_may_share_a_database(place, start_relay, tmp_path):
    second = relay_manifest(place.database.url, table="mailboat.returns")
    second["metadata"]["name"] = "returns"
    place.write(relay_manifest(place.database.url), second, subscription_manifest())
    relay: RunningRelay = start_relay("-f", str(place.folder), "--relay-id", "r1")
    relay.wait_ready()
    ids = [each["relay"] for each in json.loads(relay.get("/status")[1])["relays"]]
    assert ids == ["r1/shop/orders", "r1/shop/returns"]
    assert relay.stop() == 0
