"""Whom a storm hits: things that are killed from outside, and that must be back, as new ones, before it goes on.

A kill that hits nobody, because the victim was down still, would prove nothing. So each victim is waited for before
it is struck, and knows what it has lost: only a container that was never killed counts as being back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from cluster import Cluster
from helm_release import Installed
from mailboat_devservers.errors import ServerFailed
from namespace import Stage, restarts, running_container
from support.wait import wait_until

Pod = dict[str, Any]


class Victim(Protocol):
    def until_up(self) -> None:
        """Until it is all there, and nothing of it is what was killed."""

    def kill(self) -> int:
        """How many died: one at least."""
        ...


class Containers:
    """Containers of one name, in the pods that ``find`` finds now. ``pick`` says which of them die."""

    def __init__(
        self,
        stage: Stage,
        find: Callable[[], list[Pod]],
        container: str,
        pick: Callable[[list[Pod]], Iterable[Pod]] = lambda pods: pods,
    ) -> None:
        self._stage = stage
        self._find = find
        self._container = container
        self._pick = pick
        self._dead: set[str] = set()
        """Ids of containers."""

    def until_up(self) -> None:
        wait_until(self._missing, 240, f"every {self._container} to be up again", met=lambda missing: not missing)

    def kill(self) -> int:
        try:
            return self._kill()
        except (ServerFailed, AssertionError):  # one that was up a moment ago has died by itself: another will be there
            self.until_up()
            return self._kill()

    def _kill(self) -> int:
        struck = list(self._pick(self._find()))
        for pod in struck:
            self._dead.add(self._stage.kill(pod, self._container))
        assert struck, f"there is no {self._container} to kill"
        return len(struck)

    def _missing(self) -> list[str]:
        pods = self._find()
        return [pod["metadata"]["name"] for pod in pods if not self._is_up(pod)] if pods else ["all of them"]

    def _is_up(self, pod: Pod) -> bool:
        running = running_container(pod, self._container)
        conditions = pod["status"].get("conditions", ())
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        return ready and running is not None and running not in self._dead


class LeadingOperator:
    """The operator that the Lease names, and no other. It is back when the Lease names another process that renews it.

    Neither the dead one's pod, which starts anew, nor the other operators lead before the Lease has run out.
    """

    def __init__(self, stage: Stage, mailboat: Installed) -> None:
        self._operators = Containers(stage, mailboat.operators, "operator", pick=self._leading)
        self._mailboat = mailboat
        self._led: set[str] = set()
        """Processes that were killed while they led."""

    def until_up(self) -> None:
        self._operators.until_up()
        before = self._mailboat.lease()
        wait_until(
            self._mailboat.lease,
            180,
            f"another operator to lead than {self._led or 'nobody'}",
            met=lambda now: (
                now["renewTime"] != before["renewTime"] and now["holderIdentity"] not in {None, "", *self._led}
            ),
        )

    def kill(self) -> int:
        return self._operators.kill()

    def _leading(self, pods: list[Pod]) -> list[Pod]:
        holder = str(self._mailboat.lease()["holderIdentity"])
        self._led.add(holder)
        return [pod for pod in pods if holder.startswith(f"{pod['metadata']['name']}_")]


class ApiServer:
    """The cluster's API server. Killing one that is not there fails."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def until_up(self) -> None:
        self._cluster.until_api_answers()

    def kill(self) -> int:
        self._cluster.kill_api_server()
        return 1


def least_often_killed(pods: list[Pod]) -> list[Pod]:
    """One of them, and another one the next time."""
    return [min(pods, key=restarts)]
