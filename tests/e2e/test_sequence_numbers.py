"""The audit of the stories finds wrong sequence numbers, and only those."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

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
    """Messages in order of arrival; ``replays`` are the indexes of replayed ones."""
    arrivals = [Arrival(f"event-{each}", "order-1", each, at in replays) for at, each in enumerate(versions)]
    return [Stamped(each, generation=1, partition=0, sequence=each.version, attempt=1, body=b"{}") for each in arrivals]


def test_numbers_are_counted_per_partition_and_copies_may_repeat_them():
    messages = [message("a", 1), message("b", 2), message("a", 1), message("b", 2), message("c", 1, partition=1)]
    assert numbering(messages) == NOTHING_WRONG


@pytest.mark.parametrize(
    ("field", "count", "messages"),
    [
        ("changed_copies", 2, [message("a", 1), message("a", 2), message("b", 3), message("b", 3, body=b"[]")]),
        ("numbers_twice", 1, [message("a", 1), message("b", 1)]),
        ("numbers_left_out", 2, [message("a", 2), message("b", 4)]),
        ("attempts", 3, [message("a", 1), message("b", 2, attempt=3)]),
        ("attempts", 0, []),
    ],
)
def test_wrong_numbers_and_the_highest_attempt_are_counted(field: str, count: int, messages: list[Stamped]):
    assert getattr(numbering(messages), field) == count


@pytest.mark.parametrize(
    "came",
    [
        pytest.param((1, 2, 3, 1, 2, 3, 4), id="no event was settled"),
        pytest.param((1, 2, 3, 3, 4), id="two events were settled"),
        pytest.param((1, 2, 3, 1, 1, 2, 3, 4), id="the second relay crashed too"),
        pytest.param((1, 2, 1, 3, 2, 3, 4), id="messages of both relays interleave"),
        pytest.param((1, 2, 3, 4, 5, 1, 2, 6), id="copies come after later originals"),
        pytest.param((1, 3, 4, 1, 3, 4), id="the second event is a dead letter"),
    ],
)
def test_copies_in_the_order_of_their_originals_are_in_order(came: tuple[int, ...]):
    assert numbering(of_one_key(*came)).copies_out_of_order == 0


@given(mixed=st.lists(st.booleans(), max_size=30), begins=st.integers(1, 10))
def test_interleaved_messages_of_two_relays_are_in_order(mixed: list[bool], begins: int):
    """The first relay begins at 1, the second after the last settled event."""
    first, second = itertools.count(1), itertools.count(begins)
    sent_by_first = [next(first) for _ in range(begins - 1)]
    came = [*sent_by_first, *(next(first) if of_first else next(second) for of_first in mixed)]
    assert numbering(of_one_key(*came)).copies_out_of_order == 0


@pytest.mark.parametrize("came", [(1, 2, 3, 1, 3), (1, 2, 3, 4, 1, 4, 2), (1, 2, 3, 2, 1, 3)])
def test_a_copy_that_skips_an_event_is_out_of_order(came: tuple[int, ...]):
    assert numbering(of_one_key(*came)).copies_out_of_order == 1


def test_the_order_is_checked_per_key():
    messages = [message("a", 1), message("b", 2), message("c", 3), message("a", 1), message("c", 3)]
    assert numbering(messages).copies_out_of_order == 0


def test_a_replay_has_no_place_in_the_order():
    assert numbering(of_one_key(1, 3, 4, 2, 1, 3, replays={3})).copies_out_of_order == 0
