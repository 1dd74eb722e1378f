"""The auditor of the stories on a cluster finds numbers that are wrong, and only those."""

from __future__ import annotations

from mailboat.demo.proof import Arrival
from shop.numbering import Numbering, Stamped, numbering


def message(event_id: str, sequence: int, *, partition: int = 0, attempt: int = 1, body: bytes = b"{}") -> Stamped:
    arrival = Arrival(event_id, key=event_id, version=1, replay=False)
    return Stamped(arrival, generation=1, partition=partition, sequence=sequence, attempt=attempt, body=body)


def test_each_partition_counts_for_itself_and_copies_have_the_numbers_of_their_originals():
    messages = [message("a", 1), message("b", 2), message("a", 1), message("b", 2), message("c", 1, partition=1)]
    assert numbering(messages) == Numbering(changed_copies=0, numbers_twice=0, numbers_left_out=0, attempts=1)


def test_a_copy_under_another_number_or_with_another_content_is_none():
    messages = [message("a", 1), message("a", 2), message("b", 3), message("b", 3, body=b"[]")]
    assert numbering(messages).changed_copies == 2


def test_a_number_that_two_events_got_was_given_by_two_relays():
    assert numbering([message("a", 1), message("b", 1)]).numbers_twice == 1


def test_a_number_that_nobody_got_was_left_out():
    assert numbering([message("a", 2), message("b", 4)]).numbers_left_out == 2


def test_the_highest_attempt_is_told():
    assert numbering([message("a", 1), message("b", 2, attempt=3)]).attempts == 3


def test_where_nothing_came_nothing_is_wrong():
    assert numbering([]) == Numbering(changed_copies=0, numbers_twice=0, numbers_left_out=0, attempts=0)
