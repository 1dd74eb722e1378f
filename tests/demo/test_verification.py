"""The verification of the demo finds every violation, and only those."""

from __future__ import annotations

from mailboat_demo.verification import Arrival, Verification, Written, verify_delivery

WRITTEN = {"a1": Written("a", 1), "a2": Written("a", 2), "b1": Written("b", 1)}


def arrival(event_id: str, *, replay: bool = False) -> Arrival:
    key, version = WRITTEN.get(event_id, Written("unknown", 1))
    return Arrival(event_id, key, version, replay)


def test_the_proof_holds_if_all_events_arrive_in_order():
    proof = verify_delivery(WRITTEN, [arrival("b1"), arrival("a1"), arrival("a2")])
    assert proof == Verification(written=3, received=3, duplicates=0, lost=0, out_of_order=0, uncommitted=0)
    assert proof.holds
    assert str(proof) == "3 written, 3 received, 0 lost, 0 out of order, 0 uncommitted; duplicates: 0"


def test_repeated_events_count_as_duplicates_and_not_as_out_of_order():
    proof = verify_delivery(WRITTEN, [arrival("a1"), arrival("a2"), arrival("a1"), arrival("a2"), arrival("b1")])
    assert (proof.duplicates, proof.out_of_order, proof.holds) == (2, 0, True)


def test_a_missing_event_is_lost():
    proof = verify_delivery(WRITTEN, [arrival("a1"), arrival("b1")])
    assert (proof.lost, proof.holds) == (1, False)


def test_a_first_arrival_behind_a_later_version_is_out_of_order():
    proof = verify_delivery(WRITTEN, [arrival("a2"), arrival("a1"), arrival("b1")])
    assert (proof.out_of_order, proof.holds) == (1, False)


def test_a_marked_replay_is_not_out_of_order():
    proof = verify_delivery(WRITTEN, [arrival("a2"), arrival("b1"), arrival("a1", replay=True)])
    assert (proof.out_of_order, proof.lost, proof.holds) == (0, 0, True)


def test_an_event_that_was_never_committed_breaks_the_proof():
    proof = verify_delivery(WRITTEN, [arrival("a1"), arrival("a2"), arrival("b1"), arrival("rolled-back")])
    assert (proof.uncommitted, proof.received, proof.holds) == (1, 3, False)
