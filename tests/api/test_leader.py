"""Leader election on a real API server: one leader at a time, a quick takeover, and no leader without a valid Lease."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import pytest

from mailboat_devservers.kubernetes import ApiServer
from mailboat_devservers.proxy import Proxy
from mailboat_operator.kube.client import LEASE, Kube
from mailboat_operator.leader_election import Election, LeadershipLost, Timing
from support.operator_processes import RunningOperator
from support.wait import await_until

SOON = Timing(duration=5, renew_within=3.0, retry_period=0.3)
SURE = Timing(duration=5, renew_within=40.0, retry_period=0.3)
"""Quick takeover, and no loss of the lead because of slow renewals."""
PATIENT = Timing(duration=60, renew_within=40.0, retry_period=0.3)
"""For tests that do not wait for a Lease to expire. A machine that stalls for a while costs no lead."""


class Candidate:
    """Runs an election as an operator does, without work to lead."""

    def __init__(self, kube: Kube, namespace: str, name: str, timing: Timing = SOON) -> None:
        self.election = Election(kube, namespace, "lead", name, timing)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.election.acquire()
        await self.election.hold()

    @property
    def leading(self) -> bool:
        return self.election._held is not None and not self.task.done()

    async def lost(self) -> LeadershipLost:
        with pytest.raises(LeadershipLost) as lost:
            await asyncio.wait_for(self.task, 60)
        return lost.value

    async def vanish(self) -> None:
        """Stop like a killed process, without a release of the Lease."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def leave(self) -> None:
        await self.vanish()
        await self.election.release()


@asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator[Kube]:
    kube = await Kube.connect(kubeconfig)
    try:
        yield kube
    finally:
        await kube.close()


async def holder(kube: Kube, namespace: str) -> str | None:
    found: str | None = (await kube.get(LEASE, namespace, "lead"))["spec"].get("holderIdentity")
    return found


async def test_of_many_candidates_one_leads_and_the_others_succeed_one_by_one(api: ApiServer, namespace: str) -> None:
    async with connected(api.kubeconfig) as kube:
        candidates = [Candidate(kube, namespace, f"candidate-{number}", PATIENT) for number in range(5)]
        leaders: list[str] = []
        while candidates:
            await await_until(lambda: any(each.leading for each in candidates), timeout=120, what="somebody to lead")
            (leader,) = [each for each in candidates if each.leading]
            assert await holder(kube, namespace) == leader.election.identity
            leaders.append(leader.election.identity)
            candidates.remove(leader)
            await leader.leave()
        assert sorted(leaders) == [f"candidate-{number}" for number in range(5)]
        lease = await kube.get(LEASE, namespace, "lead")
        assert lease["spec"]["leaseTransitions"] == 4
        assert "holderIdentity" not in lease["spec"]


async def test_a_leader_that_vanished_is_followed_when_its_lease_ran_out_and_not_before(
    api: ApiServer, namespace: str
) -> None:
    async with connected(api.kubeconfig) as kube:
        old = Candidate(kube, namespace, "old")
        await await_until(lambda: old.leading, timeout=60, what="the first to lead")
        new = Candidate(kube, namespace, "new")
        await old.vanish()
        renewed = (await kube.get(LEASE, namespace, "lead"))["spec"]["renewTime"]
        await await_until(lambda: new.leading, timeout=60, what="the second to lead")
        acquired = (await kube.get(LEASE, namespace, "lead"))["spec"]["acquireTime"]
        waited = datetime.fromisoformat(acquired) - datetime.fromisoformat(renewed)
        assert waited.total_seconds() >= SOON.duration
        await new.leave()


async def test_a_leader_whose_lease_was_taken_or_deleted_has_lost(api: ApiServer, namespace: str) -> None:
    async with connected(api.kubeconfig) as kube:
        one = Candidate(kube, namespace, "one", SURE)
        await await_until(lambda: one.leading, timeout=60, what="it to lead")
        await kube.patch(LEASE, namespace, "lead", {"spec": {"holderIdentity": "somebody"}})
        assert "somebody holds" in str(await one.lost())
        await one.election.release()
        assert await holder(kube, namespace) == "somebody", "what is not ours is not given back"

        other = Candidate(kube, namespace, "other", SURE)
        await await_until(lambda: other.leading, timeout=60, what="the next one to lead")
        await kube.delete(LEASE, namespace, "lead")
        assert "deleted" in str(await other.lost())


async def test_a_lease_that_a_person_touched_is_still_ours(api: ApiServer, namespace: str) -> None:
    async with connected(api.kubeconfig) as kube:
        one = Candidate(kube, namespace, "one", PATIENT)
        await await_until(lambda: one.leading, timeout=60, what="it to lead")
        touched = await kube.patch(LEASE, namespace, "lead", {"metadata": {"annotations": {"seen": "by me"}}})

        async def renewed() -> bool:
            lease = await kube.get(LEASE, namespace, "lead")
            return bool(lease["metadata"]["resourceVersion"] != touched["metadata"]["resourceVersion"])

        is_renewed: bool = await await_until(renewed, what="a renewal after that")
        assert is_renewed
        assert one.leading
        await one.leave()


@pytest.mark.parametrize("fault", ["deaf", "refusing"])
async def test_a_leader_that_can_not_reach_the_api_server_has_lost_before_others_lead(
    api: ApiServer, namespace: str, tmp_path: Path, proxy_factory: Callable[[int], Proxy], fault: str
) -> None:
    proxy, kubeconfig = through_proxy(api, tmp_path, proxy_factory)
    async with connected(kubeconfig) as near, connected(api.kubeconfig) as kube:
        one = Candidate(near, namespace, "one")
        await await_until(lambda: one.leading, timeout=60, what="it to lead")
        other = Candidate(kube, namespace, "other")
        if fault == "deaf":
            proxy.deafen()
        else:
            proxy.stop()
        assert "could not be renewed" in str(await one.lost())
        assert not other.leading
        await await_until(lambda: other.leading, timeout=60, what="the other to lead")
        await other.leave()


def through_proxy(api: ApiServer, folder: Path, factory: Callable[[int], Proxy]) -> tuple[Proxy, Path]:
    """Write a kubeconfig that reaches the API server through a proxy. Return both."""
    text = api.kubeconfig.read_text()
    port = api.port
    proxy = factory(port)
    assert f"127.0.0.1:{port}" in text
    kubeconfig = folder / "through-proxy"
    kubeconfig.write_text(text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{proxy.port}"))
    return proxy, kubeconfig


# ---- operator processes -------------------------------------------------------------------------------------------


def test_a_process_that_lost_the_lead_ends_with_an_error(api: ApiServer, namespace: str, tmp_path: Path) -> None:
    # A long Lease leaves time for an orderly shutdown, even on a slow machine.
    flags = ("--webhook-certs=off", "--lease-duration=60s")
    leader = RunningOperator(tmp_path, "first", api.kubeconfig, namespace, *flags)
    try:
        leader.wait_leading()
        patch = json.dumps({"spec": {"holderIdentity": "somebody"}})
        api.kubectl("patch", "lease", "mailboat-operator", "-n", namespace, "--type=merge", "--patch", patch)
        assert leader.process.wait(timeout=60) == 1
    finally:
        leader.end()
    assert leader.lines()[-1]["message"] == "Lost leader election lease, restarting"
    assert "Traceback" not in leader.text
