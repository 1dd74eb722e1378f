"""A stage: one namespace with a database, brokers and a shop in it, and the hands to work on it.

Everything goes through ``kubectl``, as a person would do it; what happens inside the cluster is asked of the shop
(``e2e/shop``), which runs there. Nothing here knows which provider the cluster comes from.
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
"""The label by which the namespaces of stories are known."""
KAFKA = "kafka:9092"
PASSWORD = "first-password"
DATABASE = f"postgresql://shop:{PASSWORD}@postgres:5432/shop"
STOP = ("python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
"""Tells whoever trades in a container that this is all for today. Its pod stays, and with it its last words."""
PATIENCE = 30.0
"""Seconds that a business transaction may take. A machine with far too much to do was seen to take eleven; a lock that
somebody forgot takes for ever."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A namespace that a story has for itself."""

    cluster: Cluster
    namespace: str

    # -- kubectl -----------------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, input=input)

    def apply(self, *manifests: str) -> None:
        """Manifests as text, or names of files in ``e2e/manifests``. ``$namespace`` and images are filled in."""
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

    # -- what resources say ------------------------------------------------------------------------------------------

    def status(self, name: str, kind: str = "eventsubscription") -> dict[str, Any]:
        answer: dict[str, Any] = self.get(kind, name).get("status") or {}
        return answer

    def condition(self, name: str, type_: str, kind: str = "eventsubscription") -> dict[str, Any]:
        """The condition of that type; an empty one where there is none yet."""
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
        """Until a subscription's status says so."""
        wait_until(
            lambda: self.status(name).get(field),
            timeout,
            f"the {field} of {name} to be {wanted}",
            met=lambda value: value == wanted,
        )

    def until_lag(self, name: str, wanted: int = 0, timeout: float = 180.0) -> None:
        self.until_status(name, "lag", wanted, timeout)

    def set_state(self, name: str, state: str) -> None:
        """Pause a subscription or let it go on, and wait until it says so."""
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
            lambda: self._states_by_relays(name), 180, f"the relays to have it {state}", met=lambda now: now == {state}
        )

    def _states_by_relays(self, name: str) -> set[str]:
        """A subscription's state, by the word of all relays that answer."""
        reports = [report for pod in self.relay_pods() for report in self.relays_in(pod["metadata"]["name"])]
        told = [each for report in reports for each in report["subscriptions"]]
        return {each["state"] for each in told if each["name"] == f"{self.namespace}/{name}"}

    def relay_pods(self, relay: str = "") -> list[dict[str, Any]]:
        """Pods of relays' Deployments that are not on their way out."""
        of_one = f",app.kubernetes.io/instance={relay}" if relay else ""
        return staying(self.all("pods", f"app.kubernetes.io/name=mailboat-relay{of_one}"))

    def relay_status(self, pod: str, port: int = 9808) -> dict[str, Any]:
        """A relay's own word, asked through the API server."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{port}/proxy/status"
        answer: dict[str, Any] = json.loads(self.cluster.kubectl("get", "--raw", path))
        return answer

    def relays_in(self, pod: str) -> list[dict[str, Any]]:
        """The same of a pod that has just been made, or is about to go: where nobody answers, nothing is known."""
        try:
            answer: list[dict[str, Any]] = self.relay_status(pod)["relays"]
        except self.cluster.Failed:
            return []
        return answer

    def in_postgres(self, statement: str, database: str = "postgres") -> str:
        """As the superuser; answers are lines of cells with ``|`` between them."""
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
        """The same, where a server that it needs may be away."""
        return self.cluster.commands.try_kubectl(
            *("--namespace", self.namespace, "exec", "deployment/shop", "--", "python", "-m", "shop", *arguments)
        )

    def prepare(self, *asked: str) -> None:
        """Tables and topics. The address of a server that is ready may still lead nowhere for a moment."""
        wait_until(
            lambda: self.try_shop("prepare", *asked), 180, "tables and topics", met=lambda answer: answer.status == 0
        )

    def trade(self, count: int, writers: int = 8) -> None:
        """So many committed changes, as fast as it goes."""
        report = json.loads(self.shop("trade", "--count", str(count), "--writers", str(writers)))
        assert report["slowest"] < PATIENCE, f"something held the shop up (G10): {report}"

    @contextmanager
    def trading(self) -> Iterator[dict[str, Any]]:
        """A load that goes on all the while, and is over, to the last commit, afterwards; then its report is there.

        Whatever else a story does, the shop must not notice (G10): no change of an order may fail while the database is
        there, and none may take long.
        """
        self.kubectl("delete", "pod", "trader", "--ignore-not-found")
        self.apply("trader")
        report: dict[str, Any] = {}
        try:
            self.until_written(1)
            yield report
        finally:
            end = wait_until(self._sent_home, 180, "the trader to go home", met=_OVER.__contains__)
        said = self.kubectl("logs", "trader")
        assert end == "Succeeded", f"the shop has complaints (G10):\n{said}"
        report.update(json.loads(said.splitlines()[-1]))  # before it a library may have had something to say
        assert report["slowest"] < PATIENCE, f"something held the shop up (G10): {report}"

    def _sent_home(self) -> str:
        """The phase of the trader's pod. Whether it has heard it nobody knows: it is told again until it goes."""
        self.cluster.commands.try_kubectl("--namespace", self.namespace, "exec", "trader", "--", *STOP)
        phase: str = self.get("pod", "trader")["status"]["phase"]
        return phase

    def written(self) -> int:
        """How many changes were committed so far."""
        return int(self.in_postgres("select count(*) from shop.changes", "shop"))

    def until_written(self, more: int) -> None:
        """Until so many more are committed: what a story did just now was done under load."""
        before = self.written()
        wait_until(self.written, 120, f"{more} changes to be committed", met=lambda now: now >= before + more)

    def arrived(self, topic: str = "orders") -> int | None:
        """How many messages a topic of Kafka got so far; None if it can't be asked just now."""
        answer = self.try_shop("arrived", "--kafka", KAFKA, "--topic", topic)
        return int(answer.out) if answer.status == 0 else None

    def proof(self, topic: str) -> dict[str, Any] | None:
        """What was committed against what has arrived by now; ``project/topic`` is Pub/Sub's. None if it can't be asked
        just now."""
        broker = [] if "/" in topic else ["--kafka", KAFKA]
        answer = self.try_shop("audit", *broker, "--topic", topic)
        return json.loads(answer.out) if answer.status == 0 else None

    def audit(self, topic: str, within: float = 120.0, lost: int = 0) -> dict[str, Any]:
        """The proof, once all has arrived, but for what is known to be missing."""
        what = f"all to arrive at {topic}" if not lost else f"all but {lost} to arrive at {topic}"
        proof = wait_until(
            lambda: self.proof(topic), within, what, met=lambda proof: proof is not None and proof["lost"] == lost
        )
        assert proof is not None
        return proof

    # -- violence ----------------------------------------------------------------------------------------------------

    def kill(self, pod: dict[str, Any], container: str) -> str:
        """SIGKILL for a container, from outside: Kubernetes learns of it like of any crash. Its id is returned."""
        running = running_container(pod, container)
        assert running is not None, f"{pod['metadata']['name']} has no {container} that runs: nothing to kill"
        self.cluster.signal_container(running, "SIGKILL")
        return running

    @contextmanager
    def frozen(self, pod: dict[str, Any], container: str) -> Iterator[None]:
        """A container that stands still: its connections stay open, and it answers nothing."""
        running = running_container(pod, container)
        assert running is not None, f"{pod['metadata']['name']} has no {container} that runs: nothing to freeze"
        self.cluster.signal_container(running, "SIGSTOP")
        try:
            yield
        finally:
            self.cluster.signal_container(running, "SIGCONT")

    @contextmanager
    def cut_off(self, pod: dict[str, Any]) -> Iterator[None]:
        """A pod whose packets to and from other pods are dropped, as on a node that lost its network."""
        rules = [("FORWARD", way, pod["status"]["podIP"], "--jump", "DROP") for way in ("--source", "--destination")]
        with ExitStack() as open_again:
            for rule in rules:
                self.cluster.firewall("--insert", *rule)
                open_again.callback(self.cluster.firewall, "--delete", *rule)
            yield


def staying(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are not on their way out."""
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """What is known of a pod's containers, sidecars included."""
    return [*pod["status"].get("containerStatuses", ()), *pod["status"].get("initContainerStatuses", ())]


def running_container(pod: dict[str, Any], name: str) -> str | None:
    """The id of the container of that name, if it runs."""
    found = next((each for each in containers(pod) if each["name"] == name), None)  # one just made has none yet
    return found["containerID"].partition("://")[2] if found is not None and "running" in found["state"] else None


def restarts(pod: dict[str, Any]) -> int:
    return sum(each["restartCount"] for each in containers(pod))


def wrong_in(proof: dict[str, Any]) -> dict[str, int]:
    """What must not be, whatever was killed: empty if all is well."""
    return {field: proof[field] for field in _WRONGS if proof[field]}


_WRONGS = ("lost", "out_of_order", "uncommitted", "changed_copies", "numbers_twice")
_OVER = ("Succeeded", "Failed")
