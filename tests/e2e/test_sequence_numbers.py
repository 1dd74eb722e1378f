"""The auditor of the stories on a cluster finds numbers that are wrong, and only those."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_demo.verification import Arrival
from shop.sequence_numbers import Numbering, Stamped, numbering

NOTHING_WRONG = Numbering(changed_copies=0, numbers_twice=0, copies_out_of_order=0, numbers_left_out=0, attempts=1)


def message(event_id: str, sequence: int, *, partition: int = 0, attempt: int = 1, body: bytes = b"{}") -> Stamped:
    arrival = Arrival(event_id, key=event_id, version=1, replay=False)
    return Stamped(arrival, generation=1, partition=partition, sequence=sequence, attempt=attempt, body=body)


def of_one_key(*versions: int, replays: Iterable[int] = ()) -> list[Stamped]:
    """Messages as they came; ``replays`` are the places of those that somebody sent once more."""
    arrivals = [Arrival(f"event-{each}", "order-1", each, at in replays) for at, each in enumerate(versions)]
    return [Stamped(each, generation=1, partition=0, sequence=each.version, attempt=1, body=b"{}") for each in arrivals]


def test_each_partition_counts_for_itself_and_copies_have_the_numbers_of_their_originals():
    messages = [message("a", 1), message("b", 2), message("a", 1), message("b", 2), message("c", 1, partition=1)]
    assert numbering(messages) == NOTHING_WRONG


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
    assert numbering([]) == replace(NOTHING_WRONG, attempts=0)


@pytest.mark.parametrize(
    "came",
    [
        pytest.param((1, 2, 3, 1, 2, 3, 4), id="the next relay begins where nothing was settled"),
        pytest.param((1, 2, 3, 3, 4), id="or later"),
        pytest.param((1, 2, 3, 1, 1, 2, 3, 4), id="or dies soon, too"),
        pytest.param((1, 2, 1, 3, 2, 3, 4), id="messages of the one that died come in between"),
        pytest.param((1, 2, 3, 4, 5, 1, 2, 6), id="or after all"),
        pytest.param((1, 3, 4, 1, 3, 4), id="the second is dead"),
    ],
)
def test_copies_that_follow_one_another_as_the_originals_did_are_in_order(came: tuple[int, ...]):
    assert numbering(of_one_key(*came)).copies_out_of_order == 0


@given(mixed=st.lists(st.booleans(), max_size=30), begins=st.integers(1, 10))
def test_two_relays_whose_messages_mix_leave_nothing_out(mixed: list[bool], begins: int):
    """The first one begins at 1; the second where the first one, by then, had settled."""
    first, second = itertools.count(1), itertools.count(begins)
    sent_by_first = [next(first) for _ in range(begins - 1)]
    came = [*sent_by_first, *(next(first) if of_first else next(second) for of_first in mixed)]
    assert numbering(of_one_key(*came)).copies_out_of_order == 0


@pytest.mark.parametrize("came", [(1, 2, 3, 1, 3), (1, 2, 3, 4, 1, 4, 2), (1, 2, 3, 2, 1, 3)])
def test_a_copy_that_comes_before_its_turn_is_out_of_order(came: tuple[int, ...]):
    assert numbering(of_one_key(*came)).copies_out_of_order == 1


def test_keys_do_not_wait_for_each_other():
    messages = [message("a", 1), message("b", 2), message("c", 3), message("a", 1), message("c", 3)]
    assert numbering(messages).copies_out_of_order == 0


def test_what_was_replayed_has_no_place():
    assert numbering(of_one_key(1, 3, 4, 2, 1, 3, replays={3})).copies_out_of_order == 0
