"""Changes under a running relay: many configurations, a database password, the secrets of a sink.

The relay closes its sessions in an orderly way, so no event is lost or delivered twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import sql

from mailboat.runtime.secrets import find_secrets
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres import Database
from support.cli import Operator, RunningRelay
from support.collectors import KafkaCollector
from support.inprocess_relay import STAGED, StagedSink, serving
from support.kubelet_volumes import Volume
from support.ledger import check_delivery
from support.manifests import Manifest, kafka_sink
from support.racing_writers import Racers
from support.relay_processes import outbox_relay, shares, subscription
from support.wait import await_until, wait_until

PATIENCE = 60.0
"""Seconds. A step that takes one second on an idle machine may take many on a busy one."""

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


class Pods:
    """Relays as the operator starts them: one volume with the configuration, and one token each."""

    def __init__(self, place: Path) -> None:
        self.config = Volume(place / "config")
        self.secrets = place / "secrets"
        self.secrets.mkdir()
        self.running: dict[str, RunningRelay] = {}
        self._place = place
        self._operator = Operator("faults/pod")
        self._versions = itertools.count(1)

    def mount(self, *documents: Manifest) -> int:
        version, text = self._config_version(documents)
        self.config.fill({"resources.yaml": text, "operator-keys.pem": self._operator.public_keys})
        return version

    def push(self, *documents: Manifest) -> int:
        version, text = self._config_version(documents)
        token = self._operator.sign("PUT", "/config", text.encode())
        relays = self.running.values()
        with ThreadPoolExecutor(len(relays)) as calls:  # in parallel, as the operator does
            answers = list(calls.map(lambda relay: relay.put("/config", text.encode(), token)[0], relays))
        assert answers == [200] * len(relays)
        return version

    def _config_version(self, documents: tuple[Manifest, ...]) -> tuple[int, str]:
        version = next(self._versions)
        documents[0]["metadata"]["annotations"] = {"mailboat.dev/config-version": str(version)}
        return version, yaml.safe_dump_all(documents)

    def start(self, name: str) -> RunningRelay:
        arguments = ["--follow", "-f", str(self.config.folder / "resources.yaml"), "--relay-id", name]
        arguments += ["--secrets-dir", str(self.secrets), "--audience", "faults/pod"]
        arguments += ["--control-keys", str(self.config.folder / "operator-keys.pem")]
        self.running[name] = RunningRelay(arguments, self.log(name))
        return self.running[name]

    def log(self, name: str) -> Path:
        return self._place / f"{name}.log"

    def status(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.running[name].get("/status")[1])
        return document

    def messages(self, name: str) -> list[str]:
        return [line["message"] for line in self.running[name].lines()]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    yield pods
    for relay in pods.running.values():
        if relay.process.poll() is None:
            relay.process.kill()
            relay.process.wait(timeout=10)


CHANGES: tuple[dict[str, Any], ...] = (
    {"partitions": 8},
    {"partitions": 8, "filter": {"eventTypes": ["account.*"]}},
    {"partitions": 2},
    {"partitions": 2, "state": "Paused"},
    {"partitions": 2, "delivery": {"timeout": "5s", "batchSize": 7}},
    {"partitions": 5, "state": "Paused"},
    {"partitions": 5, "filter": {"eventTypes": ["account.changed", "other"]}},
    {"partitions": 4, "format": "CloudEvents"},
    {"partitions": 4, "delivery": {"timeout": "20s", "maxAttempts": 3}},
    {"partitions": 4},
)


def test_a_configuration_that_changes_twenty_times_under_load(
    outbox: Database, kfake: KafkaServer, collector: KafkaCollector, pods: Pods
) -> None:
    def documents(**spec: Any) -> list[Manifest]:
        return [outbox_relay(outbox.url), subscription("kfake", kafka_sink(kfake.bootstrap, collector.topic), **spec)]

    def shared() -> bool:
        """Both relays own partitions, and no partition is being handed over."""
        return shares(outbox.url).keys() == pods.running.keys()

    pods.mount(*documents(partitions=4))
    for name in ("relay-1", "relay-2"):
        pods.start(name)
    for relay in pods.running.values():
        relay.wait_ready()
    with Racers(outbox.url, writers=4, seed=51) as racers:
        wait_until(lambda: shared() and collector.arrivals, PATIENCE, "both relays to move events")
        for number, (last, change) in enumerate(itertools.pairwise(({"partitions": 4}, *CHANGES, *CHANGES))):
            # Each relay polls its volume on its own schedule. A changed number of partitions is therefore pushed to
            # both relays at once. If one relay repartitioned long before the other got the configuration, the other
            # relay would be interrupted.
            by_mount = number % 2 == 1 and last["partitions"] == change["partitions"]
            if last["partitions"] != change["partitions"]:
                wait_until(shared, PATIENCE, "both to have a share of what is to change")
            version = (pods.mount if by_mount else pods.push)(*documents(**change))
            for name in pods.running:
                _until_in_use(pods, name, version, change)
            racers.wait(0.3)
        ledger = racers.finish()
    collector.until_all(ledger.committed, timeout=60)
    collector.until_quiet()
    print(check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals))  # noqa: T201 - shown with -s
    for name, relay in pods.running.items():
        assert relay.stop() == 0
        assert not [message for message in pods.messages(name) if message.startswith("Not connected:")]


def test_a_subscription_that_is_deleted_and_created_again_under_load_sends_nothing_twice(
    outbox: Database, kfake: KafkaServer, collector: KafkaCollector, pods: Pods
) -> None:
    """Guarantee G9: kubectl replace --force, a pruned and re-applied manifest, a re-installed chart."""
    relay = outbox_relay(outbox.url)
    relay["metadata"]["uid"] = "relay-uid"

    def created(number: int, **spec: Any) -> list[Manifest]:
        stream = subscription("kfake", kafka_sink(kfake.bootstrap, collector.topic), **spec)
        stream["metadata"]["uid"] = f"uid-{number}"
        return [relay, stream]

    def retired() -> bool:
        return outbox.execute("select retired_at is not null from mailboat.subscriptions") == [(True,)]

    pods.mount(*created(0, partitions=4))
    for name in ("relay-1", "relay-2"):
        pods.start(name).wait_ready()
    with Racers(outbox.url, writers=4, seed=52) as racers:
        wait_until(lambda: shares(outbox.url).keys() == pods.running.keys(), PATIENCE, "both relays to move events")
        for number in range(1, 7):
            if number % 3:
                pods.push(relay)
                wait_until(retired, PATIENCE, "the subscription to be retired")
                racers.wait(0.5)
            partitions = 4 if number < 4 else 6
            version = pods.push(*created(number, partitions=partitions))
            for name in pods.running:
                _until_in_use(pods, name, version, {"partitions": partitions})
            racers.wait(0.5)
        ledger = racers.finish()
    collector.until_all(ledger.committed, timeout=60)
    collector.until_quiet()
    check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals)


def _until_in_use(pods: Pods, name: str, version: int, change: dict[str, Any]) -> None:
    def in_use() -> bool:
        told = pods.status(name)
        (subscription,) = told["relays"][0]["subscriptions"]
        return (told["config"]["version"], subscription["state"], subscription["partitions"]) == (
            version,
            change.get("state", "Running"),
            change["partitions"],
        )

    wait_until(in_use, PATIENCE, f"{name} to take up version {version}: {change}")


@pytest.fixture
def user(outbox: Database, unique_name: Callable[[str], str]) -> Iterator[str]:
    """Name of a role with the rights of a relay that must log in with a password."""
    name = unique_name("rotating").replace("-", "_")
    role = sql.Identifier(name)
    outbox.execute(sql.SQL("create role {} login in role mailboat_relay, needs_password").format(role))
    yield name
    outbox.execute(sql.SQL("select pg_terminate_backend(pid) from pg_stat_activity where usename = {}").format(name))
    outbox.execute(sql.SQL("drop role {}").format(role))


def test_a_password_that_is_changed_under_load_and_once_wrongly(
    outbox: Database, user: str, kfake: KafkaServer, collector: KafkaCollector, pods: Pods
) -> None:
    def alter(password: str) -> None:
        outbox.execute(sql.SQL("alter role {} password {}").format(sql.Identifier(user), password))

    def mounted(password: str) -> str:
        return secret.fill({"url": outbox.url_for(user, password)})

    def told() -> dict[str, Any]:
        relay: dict[str, Any] = pods.status("relay-1")["relays"][0]
        return relay

    def until_connected(times: int) -> None:
        wait_until(lambda: pods.messages("relay-1").count("Connected.") >= times, PATIENCE, f"connection {times}")

    def until_delivered() -> None:
        here = len(collector.arrivals)
        wait_until(lambda: len(collector.arrivals) > here + 50, PATIENCE, "delivery to go on")

    secret = Volume(pods.secrets / "db")
    alter("first-password")
    mounted("first-password")
    relay = outbox_relay(outbox.url, manageSchema=False)
    relay["spec"]["database"] = {"urlSecretRef": {"name": "db", "key": "url"}}
    pods.mount(relay, subscription("kfake", kafka_sink(kfake.bootstrap, collector.topic), partitions=4))
    pods.start("relay-1").wait_ready()
    with Racers(outbox.url, writers=4, seed=52) as racers:
        until_delivered()
        for turn in range(3):
            alter(f"password-{turn}")  # required for new connections from now on; existing connections stay open
            version = mounted(f"password-{turn}")
            until_connected(turn + 2)
            until_delivered()
            assert pods.status("relay-1")["secrets"] == {"db": version}
        mounted("guessed-password")
        wait_until(lambda: told()["state"] == "Connecting", PATIENCE, "the relay to be refused")
        wait_until(lambda: "password authentication failed" in told()["message"], PATIENCE, "the refusal to be told")
        racers.wait(1.0)
        mounted("password-2")
        until_connected(5)
        until_delivered()
        ledger = racers.finish()
    collector.until_all(ledger.committed, timeout=60)
    collector.until_quiet()
    print(check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals))  # noqa: T201 - shown with -s
    everything = pods.log("relay-1").read_text() + json.dumps(pods.status("relay-1"))
    assert not [word for word in ("first-password", "password-", "guessed") if word in everything]
    assert pods.running["relay-1"].stop() == 0


def test_a_database_secret_that_comes_late_or_vanishes(
    outbox: Database, kfake: KafkaServer, collector: KafkaCollector, pods: Pods
) -> None:
    relay = outbox_relay(outbox.url)
    relay["spec"]["database"] = {"urlSecretRef": {"name": "db", "key": "url"}}
    pods.mount(relay, subscription("kfake", kafka_sink(kfake.bootstrap, collector.topic)))
    pods.start("relay-1")
    wait_until(
        lambda: "spec.database.urlSecretRef" in pods.running["relay-1"].get("/readyz")[1], PATIENCE, "the complaint"
    )
    assert pods.running["relay-1"].get("/livez")[0] == 200
    secret = Volume(pods.secrets / "db")
    secret.fill({"url": "no url at all"})
    wait_until(lambda: "libpq" in pods.running["relay-1"].get("/readyz")[1], PATIENCE, "the next complaint")
    secret.fill({"url": outbox.url})
    pods.running["relay-1"].wait_ready()
    secret.fill({})  # existing connections stay open
    wait_until(lambda: pods.status("relay-1")["secrets"] != {}, PATIENCE, "the empty secret to be seen")
    with psycopg.connect(outbox.url) as connection:
        connection.execute("select mailboat.emit('account.changed', '{}'::bytea, key => 'k')")
    wait_until(lambda: collector.arrivals, PATIENCE, "the event")
    assert pods.running["relay-1"].stop() == 0


async def test_a_sink_secret_changes_during_a_database_outage(stage: dict[str, StagedSink], tmp_path: Path) -> None:
    """Also with fixed manifests: the first connection uses the current password, not the one read at the start."""
    login = Volume(tmp_path / "secrets" / "login")
    login.fill({"password": "old"})
    sink = {"custom": STAGED["custom"] | {"configSecretRef": {"name": "login"}}}
    manifests = outbox_relay(f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"), subscription("orders", sink)
    async with serving(*manifests, secrets=find_secrets(tmp_path / "secrets", {})) as relay:
        await await_until(lambda: relay.status().reason == "DatabaseUnreachable", what="the first refusal")
        assert stage["orders"].given.secrets == {"password": "old"}
        login.fill({"password": "new"})
        relay.refresh()
        await await_until(lambda: stage["orders"].given.secrets == {"password": "new"}, what="the new password")
