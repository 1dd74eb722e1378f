"""The namespace of a story, with Postgres, brokers and the shop, and the operations of stories on it.

Every operation is a kubectl command. The shop (``e2e/shop``) runs inside the cluster and reads databases and brokers
for the stories. This module is independent of the cluster's provider.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from cluster import Cluster
from mailboat_devservers.kubernetes_commands import Answer
from support.wait import wait_until

MANIFESTS = Path(__file__).with_name("manifests")
STORY = "mailboat-story"
"""Label of the namespaces of stories."""
KAFKA = "kafka:9092"
PASSWORD = "first-password"
DATABASE = f"postgresql://shop:{PASSWORD}@postgres:5432/shop"
STOP = ("python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
"""Stops the trader of a container. Its pod stays, and its log with the report."""
SLOWEST_CHANGE = 30.0
"""Seconds that a business transaction may take. The longest on an overloaded machine was 11 s; a lock that is never
released has no limit."""


@dataclass(frozen=True, slots=True)
class StoryNamespace:
    """The namespace of one story."""

    cluster: Cluster
    namespace: str

    # -- kubectl -----------------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, input=input)

    def apply(self, *manifests: str) -> None:
        """Apply manifests, given as text or as names of files in ``e2e/manifests``, with variables filled in."""
        for manifest in manifests:
            text = manifest if "\n" in manifest else (MANIFESTS / f"{manifest}.yaml").read_text(encoding="utf-8")
            self.kubectl("apply", "--filename", "-", input=self.filled_in(text))

    def filled_in(self, text: str) -> str:
        names = {f"image_{name.replace('-', '_')}": tag for name, tag in self.cluster.images.items()}
        return Template(text).safe_substitute(namespace=self.namespace, database=DATABASE, **names)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "--output=json"))
        return found

    def all(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        return self.cluster.list(kind, self.namespace, selector)

    # -- status ------------------------------------------------------------------------------------------------------

    def status(self, name: str, kind: str = "eventsubscription") -> dict[str, Any]:
        answer: dict[str, Any] = self.get(kind, name).get("status") or {}
        return answer

    def condition(self, name: str, type_: str, kind: str = "eventsubscription") -> dict[str, Any]:
        """The condition of that type, or an empty one."""
        conditions = self.status(name, kind).get("conditions") or ()
        return next((each for each in conditions if each["type"] == type_), {})

    def until_ready(self, *names: str, kind: str = "eventsubscription", timeout: float = 180.0) -> None:
        for name in names:
            wait_until(
                partial(self.condition, name, "Ready", kind),
                timeout,
                f"{kind} {name} to be Ready",
                met=lambda ready: ready.get("status") == "True",
            )

    def until_status(self, name: str, field: str, wanted: object, timeout: float = 180.0) -> None:
        """Wait until a field of a subscription's status has the value."""
        wait_until(
            lambda: self.status(name).get(field),
            timeout,
            f"the {field} of {name} to be {wanted}",
            met=lambda value: value == wanted,
        )

    def until_lag(self, name: str, wanted: int = 0, timeout: float = 180.0) -> None:
        self.until_status(name, "lag", wanted, timeout)

    def set_state(self, name: str, state: str) -> None:
        """Set the state of a subscription, and wait until the operator and all relays report it."""
        patch = f'{{"spec": {{"state": "{state}"}}}}'
        self.kubectl("patch", "eventsubscription", name, "--type=merge", "--patch", patch)
        paused = "True" if state == "Paused" else "False"
        wait_until(
            lambda: self.condition(name, "Paused").get("status"),
            180,
            f"{name} to be {state}",
            met=lambda now: now == paused,
        )
        wait_until(
            lambda: self._states_by_relays(name), 180, f"the relays to report {state}", met=lambda now: now == {state}
        )

    def _states_by_relays(self, name: str) -> set[str]:
        """States of a subscription in the reports of all relays that answer."""
        reports = [report for pod in self.relay_pods() for report in self.relays_in(pod["metadata"]["name"])]
        subscriptions = [each for report in reports for each in report["subscriptions"]]
        return {each["state"] for each in subscriptions if each["name"] == f"{self.namespace}/{name}"}

    def relay_pods(self, relay: str = "") -> list[dict[str, Any]]:
        """Pods of relays' Deployments, without terminating ones."""
        of_one = f",app.kubernetes.io/instance={relay}" if relay else ""
        return staying(self.all("pods", f"app.kubernetes.io/name=mailboat-relay{of_one}"))

    def relay_status(self, pod: str, port: int = 9808) -> dict[str, Any]:
        """The status of a relay, through the API server's proxy."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{port}/proxy/status"
        answer: dict[str, Any] = json.loads(self.cluster.kubectl("get", "--raw", path))
        return answer

    def relays_in(self, pod: str) -> list[dict[str, Any]]:
        """Relays in the status of a pod. Empty if the pod starts or stops and does not answer."""
        try:
            answer: list[dict[str, Any]] = self.relay_status(pod)["relays"]
        except self.cluster.Failed:
            return []
        return answer

    def in_postgres(self, statement: str, database: str = "postgres") -> str:
        """Run a statement as the superuser and return lines of cells separated by ``|``."""
        psql = (
            "psql",
            "--host=127.0.0.1",
            "--username=postgres",
            f"--dbname={database}",
            "--tuples-only",
            "--no-align",
        )
        return self.kubectl(
            *("exec", "statefulset/postgres", "--", *psql, "--set=ON_ERROR_STOP=1", "--command", statement)
        )

    # -- the shop ----------------------------------------------------------------------------------------------------

    def shop(self, *arguments: str) -> str:
        return self.kubectl("exec", "deployment/shop", "--", "python", "-m", "shop", *arguments)

    def try_shop(self, *arguments: str) -> Answer:
        """Run a command of the shop that may fail because a server is down."""
        return self.cluster.commands.try_kubectl(
            *("--namespace", self.namespace, "exec", "deployment/shop", "--", "python", "-m", "shop", *arguments)
        )

    def prepare(self, *options: str) -> None:
        """Create tables and topics. Retried, since the Service of a ready server may not route to it yet."""
        wait_until(
            lambda: self.try_shop("prepare", *options), 180, "tables and topics", met=lambda answer: answer.status == 0
        )

    def trade(self, count: int, writers: int = 8) -> None:
        """Commit a number of changes at full rate."""
        report = json.loads(self.shop("trade", "--count", str(count), "--writers", str(writers)))
        assert report["slowest"] < SLOWEST_CHANGE, f"the shop was delayed (G10): {report}"

    @contextmanager
    def trading(self) -> Iterator[dict[str, Any]]:
        """Run a load during the block, and fill its report after the last commit.

        A relay must not harm the writers (G10): while the database is up, no change of an order may fail or exceed
        ``SLOWEST_CHANGE``.
        """
        self.kubectl("delete", "pod", "trader", "--ignore-not-found")
        self.apply("trader")
        report: dict[str, Any] = {}
        try:
            self.until_written(1)
            yield report
        finally:
            end = wait_until(self._stop_trader, 180, "the trader to end", met=_ENDED.__contains__)
        log = self.kubectl("logs", "trader")
        assert end == "Succeeded", f"the shop reports errors (G10):\n{log}"
        report.update(json.loads(log.splitlines()[-1]))  # libraries may log before it
        assert report["slowest"] < SLOWEST_CHANGE, f"the shop was delayed (G10): {report}"

    def _stop_trader(self) -> str:
        """Signal the trader and return the phase of its pod. A signal may be lost, so the caller repeats it."""
        self.cluster.commands.try_kubectl("--namespace", self.namespace, "exec", "trader", "--", *STOP)
        phase: str = self.get("pod", "trader")["status"]["phase"]
        return phase

    def written(self) -> int:
        """Number of committed changes."""
        return int(self.in_postgres("select count(*) from shop.changes", "shop"))

    def until_written(self, more: int) -> None:
        """Wait until a number of further changes is committed, which proves that there is a load."""
        before = self.written()
        wait_until(self.written, 120, f"{more} changes to be committed", met=lambda now: now >= before + more)

    def arrived(self, topic: str = "orders") -> int | None:
        """Number of messages in a Kafka topic, or None if the broker does not answer."""
        answer = self.try_shop("arrived", "--kafka", KAFKA, "--topic", topic)
        return int(answer.out) if answer.status == 0 else None

    def proof(self, topic: str) -> dict[str, Any] | None:
        """Compare committed and received events; ``project/topic`` is Pub/Sub. None if a server does not answer."""
        broker = [] if "/" in topic else ["--kafka", KAFKA]
        answer = self.try_shop("audit", *broker, "--topic", topic)
        return json.loads(answer.out) if answer.status == 0 else None

    def audit(self, topic: str, within: float = 120.0, lost: int = 0) -> dict[str, Any]:
        """The proof, once all but ``lost`` events have arrived."""
        what = f"all to arrive at {topic}" if not lost else f"all but {lost} to arrive at {topic}"
        proof = wait_until(
            lambda: self.proof(topic), within, what, met=lambda proof: proof is not None and proof["lost"] == lost
        )
        assert proof is not None
        return proof

    # -- faults ------------------------------------------------------------------------------------------------------

    def kill(self, pod: dict[str, Any], container: str) -> str:
        """Send SIGKILL to a container through the node, as in a crash, and return its id."""
        running = running_container(pod, container)
        assert running is not None, f"{pod['metadata']['name']} has no running {container} to kill"
        self.cluster.signal_container(running, "SIGKILL")
        return running

    @contextmanager
    def frozen(self, pod: dict[str, Any], container: str) -> Iterator[None]:
        """Freeze a container: its connections stay open, and it does not answer."""
        running = running_container(pod, container)
        assert running is not None, f"{pod['metadata']['name']} has no running {container} to freeze"
        self.cluster.signal_container(running, "SIGSTOP")
        try:
            yield
        finally:
            self.cluster.signal_container(running, "SIGCONT")

    @contextmanager
    def cut_off(self, pod: dict[str, Any]) -> Iterator[None]:
        """Drop the packets of a pod to and from other pods, as on a node that lost its network."""
        rules = [("FORWARD", way, pod["status"]["podIP"], "--jump", "DROP") for way in ("--source", "--destination")]
        with ExitStack() as open_again:
            for rule in rules:
                self.cluster.firewall("--insert", *rule)
                open_again.callback(self.cluster.firewall, "--delete", *rule)
            yield


def staying(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pods that are not terminating."""
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Statuses of a pod's containers, sidecars included."""
    return [*pod["status"].get("containerStatuses", ()), *pod["status"].get("initContainerStatuses", ())]


def running_container(pod: dict[str, Any], name: str) -> str | None:
    """The id of the container of that name, if it runs."""
    found = next((each for each in containers(pod) if each["name"] == name), None)  # a new pod has no statuses
    return found["containerID"].partition("://")[2] if found is not None and "running" in found["state"] else None


def restarts(pod: dict[str, Any]) -> int:
    return sum(each["restartCount"] for each in containers(pod))


def violations(proof: dict[str, Any]) -> dict[str, int]:
    """Broken guarantees with their counts. Must be empty after every fault."""
    return {field: proof[field] for field in _VIOLATIONS if proof[field]}


_VIOLATIONS = ("lost", "out_of_order", "uncommitted", "changed_copies", "numbers_twice")
_ENDED = ("Succeeded", "Failed")
