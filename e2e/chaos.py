"""Targets of the disruption story: containers and the API server, killed from outside.

A kill of a target that is still down proves nothing. So each target is up before it is killed, and it remembers the ids
of its killed containers: only a container with a new id counts as up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from cluster import Cluster
from helm_release import Installed
from mailboat_devservers.errors import ServerFailed
from namespace import StoryNamespace, restarts, running_container
from support.wait import wait_until

Pod = dict[str, Any]


class Target(Protocol):
    def until_up(self) -> None:
        """Wait until all of it is ready and no container of it is a killed one."""

    def kill(self) -> int:
        """Kill it and return the number of killed processes, at least one."""
        ...


class Containers:
    """Containers of one name in the pods that ``find`` returns. ``pick`` selects the pods to kill."""

    def __init__(
        self,
        story: StoryNamespace,
        find: Callable[[], list[Pod]],
        container: str,
        pick: Callable[[list[Pod]], Iterable[Pod]] = lambda pods: pods,
    ) -> None:
        self._story = story
        self._find = find
        self._container = container
        self._pick = pick
        self._dead: set[str] = set()
        """Ids of killed containers."""

    def until_up(self) -> None:
        wait_until(self._missing, 240, f"every {self._container} to be up again", met=lambda missing: not missing)

    def kill(self) -> int:
        try:
            return self._kill()
        except (ServerFailed, AssertionError):  # a container crashed by itself; its replacement is killed instead
            self.until_up()
            return self._kill()

    def _kill(self) -> int:
        picked = list(self._pick(self._find()))
        for pod in picked:
            self._dead.add(self._story.kill(pod, self._container))
        assert picked, f"there is no {self._container} to kill"
        return len(picked)

    def _missing(self) -> list[str]:
        pods = self._find()
        return [pod["metadata"]["name"] for pod in pods if not self._is_up(pod)] if pods else ["all of them"]

    def _is_up(self, pod: Pod) -> bool:
        running = running_container(pod, self._container)
        conditions = pod["status"].get("conditions", ())
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        return ready and running is not None and running not in self._dead


class LeadingOperator:
    """The operator that holds the Lease. It is up when another process holds and renews the Lease.

    Neither the restarted pod nor the other operators lead before the Lease expires.
    """

    def __init__(self, story: StoryNamespace, mailboat: Installed) -> None:
        self._operators = Containers(story, mailboat.operators, "operator", pick=self._leading)
        self._mailboat = mailboat
        self._led: set[str] = set()
        """Killed leaders."""

    def until_up(self) -> None:
        self._operators.until_up()
        before = self._mailboat.lease()
        wait_until(
            self._mailboat.lease,
            180,
            f"an operator to lead that is none of {self._led}",
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
    """The cluster's API server. If it does not run, killing it fails."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def until_up(self) -> None:
        self._cluster.until_api_answers()

    def kill(self) -> int:
        self._cluster.kill_api_server()
        return 1


def least_often_killed(pods: list[Pod]) -> list[Pod]:
    """The pod with the fewest restarts, so that repeated kills reach all pods."""
    return [min(pods, key=restarts)]
