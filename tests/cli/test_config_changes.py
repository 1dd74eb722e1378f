"""``mailboat run --follow``: a configuration that arrives later and changes, by file or by a signed call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cli import Operator, Place, RunningRelay, relay_manifest, subscription_manifest
from support.kubelet_volumes import Volume
from support.wait import wait_until

Start = Callable[..., RunningRelay]
UID = "relay-uid-1"
PATIENCE = 60.0
"""Seconds. A step takes one on an idle machine, and many on a busy one."""

pytestmark = pytest.mark.timeout(600)


class Pod:
    """A relay as the operator starts it, with the volumes of its pod."""

    def __init__(self, tmp_path: Path, place: Place, start: Start) -> None:
        self.config = Volume(tmp_path / "config")
        self.secrets = tmp_path / "secrets"
        self.secrets.mkdir()
        self.operator = Operator("shop/relay-0/pod-uid")
        self.arrivals = tmp_path / "arrived.jsonl"
        self.arrivals.touch()
        self._place = place
        self._start = start
        self.relay: RunningRelay

    def start(self) -> None:
        self.relay = self._start(
            "--follow",
            *("-f", str(self.config.folder / "resources.yaml")),
            *("--secrets-dir", str(self.secrets)),
            *("--relay-id", "relay-0"),
            *("--control-keys", str(self.config.folder / "operator-keys.pem")),
            *("--audience", self.operator.audience),
        )

    def documents(self, version: int, *subscriptions: dict[str, Any], **outbox: Any) -> list[dict[str, Any]]:
        relay = relay_manifest(self._place.database.url, **outbox)
        relay["metadata"] |= {"uid": UID, "annotations": {"mailboat.dev/config-version": str(version)}}
        return [relay, *subscriptions]

    def to_file(self, name: str = "to-log", uid: str = "uid-1", **spec: Any) -> dict[str, Any]:
        """Return a subscription that delivers to the file ``arrivals``."""
        manifest = subscription_manifest(name, **{"sink": {"log": {"path": str(self.arrivals)}}, **spec})
        manifest["metadata"]["uid"] = uid
        return manifest

    def mount(self, version: int, *subscriptions: dict[str, Any], **outbox: Any) -> None:
        self.mount_text(yaml.safe_dump_all(self.documents(version, *subscriptions, **outbox)))

    def mount_text(self, text: str) -> None:
        self.config.fill({"resources.yaml": text, "operator-keys.pem": self.operator.public_keys})

    def push(self, version: int, *subscriptions: dict[str, Any], **outbox: Any) -> tuple[int, str]:
        body = yaml.safe_dump_all(self.documents(version, *subscriptions, **outbox)).encode()
        return self.relay.put("/config", body, self.operator.sign("PUT", "/config", body))

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.relay.get("/status")[1])
        return document

    def subscription(self, name: str = "to-log") -> dict[str, Any] | None:
        found: list[dict[str, Any]] = [
            each
            for relay in self.status()["relays"]
            for each in relay["subscriptions"]
            if each["name"] == f"shop/{name}"
        ]
        return found[0] if found else None

    def until_version(self, version: int) -> None:
        wait_until(lambda: self.status()["config"]["version"] == version, PATIENCE, f"version {version} to be in use")

    def arrived(self) -> int:
        return len(self.arrivals.read_text().splitlines())

    def until_arrived(self, count: int) -> None:
        wait_until(lambda: self.arrived() >= count, PATIENCE, f"{count} events")
        assert self.arrived() == count

    def emit(self, key: str = "k", event_type: str = "order.placed") -> None:
        self._place.ok("emit", event_type, "{}", "--key", key)


@pytest.fixture
def pod(tmp_path: Path, place: Place, start_relay: Start) -> Pod:
    return Pod(tmp_path, place, start_relay)


def test_the_process_waits_for_its_first_configuration(pod: Pod) -> None:
    pod.start()
    assert pod.relay.get("/livez")[0] == 200
    assert pod.relay.get("/readyz") == (503, "no configuration yet: waiting for it\n")
    assert pod.status() == {"relays": [], "config": {"version": None, "error": None}, "secrets": {}}
    pod.mount(1, pod.to_file())
    pod.relay.wait_ready()
    pod.emit()
    pod.until_arrived(1)
    assert pod.status()["config"] == {"version": 1, "error": None}
    assert pod.relay.stop() == 0


def test_a_wrong_configuration_is_refused_and_the_old_one_stays_in_use(pod: Pod) -> None:
    pod.mount(1, pod.to_file())
    pod.start()
    pod.relay.wait_ready()
    pod.mount(2, pod.to_file(partitionz=3))
    wait_until(lambda: pod.status()["config"]["error"], PATIENCE, "the refusal")
    told = pod.status()["config"]
    assert told["version"] == 1
    assert "spec.partitionz" in told["error"]
    assert "resources.yaml" in told["error"]
    pod.emit()
    pod.until_arrived(1)
    pod.mount_text("{")
    wait_until(lambda: "not YAML" in pod.status()["config"]["error"], PATIENCE, "the next refusal")
    pod.mount(3, pod.to_file())
    pod.until_version(3)
    assert pod.status()["config"]["error"] is None


def test_a_pushed_configuration_is_in_use_before_the_file_and_an_older_file_is_passed_over(pod: Pod) -> None:
    pod.mount(5, pod.to_file())
    pod.start()
    pod.relay.wait_ready()
    assert pod.push(7, pod.to_file(), pod.to_file("second", "uid-2")) == (200, '{"version": 7}')
    wait_until(lambda: pod.subscription("second"), PATIENCE, "the new subscription")
    status, text = pod.push(6, pod.to_file())
    assert (status, "older than 7" in text) == (409, True)
    assert pod.push(7, pod.to_file(), pod.to_file("second", "uid-2"))[0] == 200  # the same version changes nothing
    pod.mount(6, pod.to_file())
    wait_until(
        lambda: any("Configuration ignored" in line["message"] for line in pod.relay.lines()),
        PATIENCE,
        "the old file to be seen",
    )
    assert pod.status()["config"] == {"version": 7, "error": None}
    assert pod.subscription("second") is not None
    status, text = pod.push(8, pod.to_file(partitions=0))
    assert (status, "spec.partitions" in text) == (400, True)
    other = relay_manifest("postgresql://nobody@127.0.0.1:1/none")
    other["metadata"]["name"] = "others"
    body = json.dumps(other).encode()
    status, text = pod.relay.put("/config", body, pod.operator.sign("PUT", "/config", body))
    assert (status, "serves OutboxRelay shop/orders" in text) == (400, True)


def test_changes_of_a_subscription_take_effect(pod: Pod, place: Place) -> None:
    pod.mount(1, pod.to_file())
    pod.start()
    pod.relay.wait_ready()
    pod.push(2, pod.to_file(partitions=5, filter={"eventTypes": ["order.*"]}, delivery={"batchSize": 7}))
    wait_until(
        lambda: [each["partition"] for each in (pod.subscription() or {}).get("owned", ())] == list(range(5)),
        PATIENCE,
        "five partitions",
    )
    pod.emit(event_type="parcel.sent")
    pod.emit()
    pod.until_arrived(1)
    pod.push(3, pod.to_file(partitions=5, state="Paused"))
    wait_until(lambda: (pod.subscription() or {}).get("state") == "Paused", PATIENCE, "the pause")
    pod.emit()
    assert place.database.execute("select state from mailboat.subscriptions") == [("Paused",)]
    pod.push(4, pod.to_file(partitions=5))
    pod.until_arrived(2)


def test_a_change_that_concerns_pods_only_does_not_interrupt_delivery(pod: Pod) -> None:
    pod.mount(1, pod.to_file())
    pod.start()
    pod.relay.wait_ready()
    documents = pod.documents(2, pod.to_file())
    documents[0]["spec"] |= {"replicas": 3, "template": {"labels": {"team": "shop"}}}
    body = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}).encode()
    assert pod.relay.put("/config", body, pod.operator.sign("PUT", "/config", body)) == (200, '{"version": 2}')
    pod.until_version(2)
    pod.emit()
    pod.until_arrived(1)
    assert "Configuration in use" not in [line["message"] for line in pod.relay.lines()]


def test_a_deleted_subscription_continues_within_a_day_and_restarts_later_or_when_forgotten(
    pod: Pod, place: Place
) -> None:
    pod.mount(1, pod.to_file(), pod.to_file("second", "uid-2"))
    pod.start()
    pod.relay.wait_ready()
    pod.emit()
    pod.until_arrived(2)
    place.database.execute(
        "insert into mailboat.dead_letters (subscription_id, partition, attempts, sequence, reason, last_error,"
        " first_failed_at, last_failed_at, id, event_id, event_type, key, payload, content_type, created_at, slot)"
        " select s.id, 0, 5, 1, 'Refused', 'no', now(), now(), o.id, event_id, event_type, key, payload, content_type,"
        " o.created_at, slot from mailboat.outbox o, mailboat.subscriptions s where s.name = 'shop/second'"
    )
    # A subscription of another relay on the same outbox, and one without a resource. This relay must delete neither.
    place.database.execute(
        "insert into mailboat.subscriptions (outbox, name, uid, partitions, declared_by)"
        " values ('mailboat.outbox', 'shop/others', 'uid-3', 1, 'relay-uid-2'),"
        " ('mailboat.outbox', 'shop/old', '', 1, '')"
    )
    pod.push(2, pod.to_file())

    def cursors() -> list[tuple[Any, ...]]:
        return place.database.execute(
            "select s.name, count(c), s.retired_at is not null from mailboat.subscriptions s"
            " left join mailboat.cursors c on c.subscription_id = s.id group by s.id order by s.name"
        )

    kept = [("shop/old", 0, False), ("shop/others", 0, False), ("shop/second", 2, True), ("shop/to-log", 2, False)]
    wait_until(lambda: cursors() == kept, PATIENCE, "the subscription to be retired")
    assert "its progress is kept until" in place.mailboat("status").stdout
    assert "shop/second" in place.ok("dlq", "list")

    pod.push(3, pod.to_file(), pod.to_file("second", "uid-4"))  # created again: continues from its progress
    wait_until(lambda: ("shop/second", 2, False) in cursors(), PATIENCE, "the subscription to be back")
    pod.emit()
    pod.until_arrived(4)
    pod.push(4, pod.to_file(), pod.to_file("second", "uid-5"))  # replaced at once, as by kubectl replace --force
    pod.until_version(4)
    pod.emit()
    pod.until_arrived(6)

    pod.push(5, pod.to_file())
    wait_until(lambda: cursors() == kept, PATIENCE, "the subscription to be retired again")
    place.database.execute("update mailboat.subscriptions set retired_at = retired_at - interval '1 day'")
    assert "the progress of shop/second is removed" in place.ok("maintain")
    assert ("shop/second", 0, True) in cursors()
    pod.push(6, pod.to_file(), pod.to_file("second", "uid-6"))  # a day later: begins from its start
    pod.until_arrived(9)
    assert place.database.execute("select count(*) from mailboat.dead_letters") == [(1,)]

    pod.push(7, pod.to_file())
    wait_until(lambda: cursors() == kept, PATIENCE, "the subscription to be retired for the third time")
    served = (
        "select r.id from mailboat.relays r join mailboat.subscriptions s on s.id = any (r.serves)"
        " where s.name = 'shop/second'"
    )
    wait_until(lambda: not place.database.execute(served), PATIENCE, "a heartbeat without the subscription")
    place.ok("forget", "second", "--yes")
    pod.push(8, pod.to_file(), pod.to_file("second", "uid-7"))
    pod.until_arrived(12)


@pytest.mark.verify
def test_a_subscription_that_another_relay_with_an_older_configuration_moves_is_not_forgotten_yet(
    pod: Pod, place: Place, start_relay: Start, tmp_path: Path
) -> None:
    pod.mount(1, pod.to_file(), pod.to_file("second", "uid-2"))
    pod.start()
    pod.relay.wait_ready()
    slow = tmp_path / "slow.yaml"
    slow.write_text(yaml.safe_dump_all(pod.documents(1, pod.to_file(), pod.to_file("second", "uid-2"))))
    other = start_relay("--follow", "-f", str(slow), "--relay-id", "relay-1")
    other.wait_ready()
    wait_until(
        lambda: place.database.execute("select count(distinct owner) from mailboat.cursors") == [(2,)], PATIENCE, "both"
    )
    pod.emit()
    pod.until_arrived(2)
    pod.push(2, pod.to_file())
    wait_until(
        lambda: (
            place.database.execute(
                "select distinct owner from mailboat.cursors c"
                " join mailboat.subscriptions s on s.id = c.subscription_id where s.name = 'shop/second'"
            )
            == [("relay-1",)]
        ),
        PATIENCE,
        "the other relay to have all of it",
    )
    pod.emit()
    pod.until_arrived(4)
    slow.write_text(yaml.safe_dump_all(pod.documents(2, pod.to_file())))
    wait_until(
        lambda: (
            place.database.execute("select name from mailboat.subscriptions where retired_at is not null")
            == [("shop/second",)]
        ),
        PATIENCE,
        "it to be forgotten by whoever was last",
    )
    pod.emit()
    pod.until_arrived(5)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"sink": {"custom": {"type": "teleport"}}}, 'offers a sink "teleport"'),
    ],
)
def test_a_subscription_that_cannot_run_is_failed_and_does_not_block_others(
    pod: Pod, spec: dict[str, Any], complaint: str
) -> None:
    pod.mount(1, pod.to_file(), pod.to_file("second", "uid-2", **spec))
    pod.start()
    pod.relay.wait_ready()
    pod.emit()
    pod.until_arrived(1)
    failed = pod.subscription("second")
    assert failed is not None
    assert (failed["state"], failed["owned"], complaint in failed["lastError"]) == ("Failed", [], True)
    assert pod.status()["config"]["error"] is None


def test_a_secret_that_comes_later_brings_its_subscription_to_life(pod: Pod) -> None:
    kafka = {"bootstrapServers": ["127.0.0.1:1"], "topic": "orders", "configSecretRef": {"name": "kafka-login"}}
    pod.mount(1, pod.to_file(), pod.to_file("second", "uid-2", sink={"kafka": kafka}))
    pod.start()
    pod.relay.wait_ready()
    failed = pod.subscription("second")
    assert failed is not None
    assert (failed["state"], "secret kafka-login was not found" in failed["lastError"]) == ("Failed", True)
    version = Volume(pod.secrets / "kafka-login").fill({"sasl.password": "hunter2"})
    wait_until(
        lambda: (pod.subscription("second") or {}).get("state") == "Running", PATIENCE, "the subscription to run"
    )
    wait_until(lambda: pod.status()["secrets"] == {"kafka-login": version}, PATIENCE, "the version to be told")
    pod.emit()
    pod.until_arrived(1)
    assert "hunter2" not in json.dumps(pod.status())


def test_only_authorized_callers_may_push(pod: Pod) -> None:
    pod.mount(1, pod.to_file())
    pod.start()
    pod.relay.wait_ready()
    body = yaml.safe_dump_all(pod.documents(2, pod.to_file())).encode()
    assert pod.relay.put("/config", body, "nonsense")[0] == 401
    assert pod.relay.put("/config", body, pod.operator.sign("PUT", "/assignment", body))[0] == 401
    assert pod.relay.put("/config", body + b" ", pod.operator.sign("PUT", "/config", body))[0] == 401
    assert pod.status()["config"]["version"] == 1
    large = b" " * (1024 * 1024 + 1)
    assert pod.relay.put("/config", large, pod.operator.sign("PUT", "/config", large))[0] == 413


@pytest.mark.verify
def test_an_assignment_by_the_operator_is_followed_by_relays_in_processes_of_their_own(
    pod: Pod, place: Place, start_relay: Start
) -> None:
    pod.mount(1, pod.to_file(partitions=4))
    pod.start()
    other = start_relay("--follow", "-f", str(pod.config.folder / "resources.yaml"), "--relay-id", "relay-1")
    pod.relay.wait_ready()
    other.wait_ready()

    def assign(generation: int, *owners: str) -> int:
        shares = {str(partition): owner for partition, owner in enumerate(owners)}
        body = json.dumps({"generation": generation, "subscriptions": {"shop/to-log": shares}}).encode()
        return pod.relay.put("/assignment", body, pod.operator.sign("PUT", "/assignment", body))[0]

    def owners() -> list[str]:
        rows = place.database.execute("select owner from mailboat.cursors order by partition")
        return [owner for (owner,) in rows]

    def until_owned_by(wanted: list[str]) -> None:
        wait_until(lambda: owners() == wanted, PATIENCE, f"the owners to be {wanted}")

    emitted = 0
    for generation, wanted in (
        (3, ["relay-0", "relay-1", "relay-1", "relay-1"]),
        (4, ["relay-1", "relay-1", "relay-1", "relay-0"]),
        (9, ["relay-0", "relay-0", "relay-0", "relay-0"]),
    ):
        assert assign(generation, *wanted) == 200
        for key in "abcd":
            pod.emit(key)
            emitted += 1
        until_owned_by(wanted)
        pod.until_arrived(emitted)
    assert assign(8, "relay-1") == 409
    assert assign(10, *["nobody"] * 4) == 200  # a relay that is not alive, so its partitions are not reserved for it
    pod.emit("e")
    pod.until_arrived(emitted + 1)


def test_an_empty_url_is_reported_and_a_corrected_one_is_used(pod: Pod, place: Place) -> None:
    relay, *_ = pod.documents(1)
    relay["spec"]["database"] = {"urlSecretRef": {"name": "orders-db", "key": "url"}}
    secret = pod.secrets / "orders-db"
    secret.mkdir()
    (secret / "url").write_text("\n")
    pod.mount_text(yaml.safe_dump_all([relay, pod.to_file()]))
    pod.start()
    wait_until(lambda: [each["state"] for each in pod.status()["relays"]] == ["Failed"], PATIENCE, "it to be Failed")
    message = pod.status()["relays"][0]["message"]
    assert "spec.database.urlSecretRef: key url of secret orders-db is empty." in message
    (secret / "url").write_text(place.database.url)
    pod.relay.wait_ready()
