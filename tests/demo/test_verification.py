"""The verification of the demo finds every violation, and only those."""

from __future__ import annotations

import pytest

from mailboat_demo.verification import Arrival, Verification, Written, verify_delivery

WRITTEN = {"a1": Written("a", 1), "a2": Written("a", 2), "b1": Written("b", 1)}


ALL_IN_ORDER = {"written": 3, "received": 3, "duplicates": 0, "lost": 0, "out_of_order": 0, "uncommitted": 0}


@pytest.mark.parametrize(
    ("arrived", "found"),
    [
        ("b1 a1 a2", {}),
        ("a1 a2 a1 a2 b1", {"duplicates": 2}),
        ("a1 b1", {"lost": 1, "received": 2}),
        ("a2 a1 b1", {"out_of_order": 1}),
        ("a2 b1 a1:replay", {}),
        ("a1 a2 b1 rolled-back", {"uncommitted": 1}),
    ],
)
def test_the_proof_holds_if_nothing_is_lost_out_of_order_or_uncommitted(arrived: str, found: dict[str, int]):
    arrivals = []
    for event_id, _, replay in (each.partition(":") for each in arrived.split()):
        arrivals.append(Arrival(event_id, *WRITTEN.get(event_id, Written("unknown", 1)), replay=bool(replay)))
    proof = verify_delivery(WRITTEN, arrivals)
    assert proof == Verification(**ALL_IN_ORDER | found)
    assert proof.holds is (found.keys() <= {"duplicates"})


def test_the_proof_is_a_line_of_counts():
    told = "3 written, 3 received, 0 lost, 0 out of order, 0 uncommitted; duplicates: 0"
    assert str(Verification(**ALL_IN_ORDER)) == told
