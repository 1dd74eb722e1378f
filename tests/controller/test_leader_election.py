"""Expiry of a Lease, measured by the observer's clock."""

from __future__ import annotations

from typing import Any

import pytest

from mailboat_operator.leader_election import Timing, observe


def a_lease(version: str, holder: str | None = "other", duration: int | None = 15) -> dict[str, Any]:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": duration, "renewTime": "1999-01-01T00:00:00.000000Z"}
    return {"metadata": {"resourceVersion": version}, "spec": spec}


def test_a_lease_is_free_when_it_did_not_change_for_its_whole_duration() -> None:
    first = observe(a_lease("1"), None, 100.0, 60)
    assert not first.is_free(100.0), "what it says of times is another machine's clock, and does not count"
    same = observe(a_lease("1"), first, 114.9, 60)
    assert not same.is_free(114.9)
    assert same.is_free(115.0)


def test_every_change_of_the_lease_restarts_the_wait() -> None:
    observed = observe(a_lease("1"), None, 100.0, 60)
    observed = observe(a_lease("2"), observed, 114.0, 60)
    assert not observed.is_free(128.9)
    assert observed.is_free(129.0)


@pytest.mark.parametrize("holder", [None, ""])
def test_a_lease_that_was_given_back_is_free_at_once(holder: str | None) -> None:
    assert observe(a_lease("1", holder), None, 100.0, 60).is_free(100.0)
    assert observe({"metadata": {"resourceVersion": "1"}}, None, 100.0, 60).is_free(100.0)


def test_the_duration_in_the_lease_overrides_the_setting() -> None:
    assert observe(a_lease("1", duration=5), None, 0.0, 60).is_free(5.0)
    assert not observe(a_lease("1", duration=None), None, 0.0, 60).is_free(59.0)


@pytest.mark.parametrize("duration", [3, 15, 300])
def test_a_leader_gives_up_before_its_lease_expires_and_retries_before_that(duration: int) -> None:
    timing = Timing.of(duration)
    assert timing.duration >= duration
    assert timing.renew_within + duration / 5 < timing.duration, "there is no time left to end in"
    assert timing.retry_period * 3 < timing.renew_within
