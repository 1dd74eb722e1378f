"""The calls that a failure blocks, and the end of the block."""

from __future__ import annotations

from mailboat.sinks.key_fence import FenceTicket, KeyFence


def test_a_call_that_begins_while_a_key_is_blocked_is_blocked_and_later_ones_are_not() -> None:
    stops = KeyFence()
    with FenceTicket(stops) as first:
        first.begin()
        first.stop("k")
        with FenceTicket(stops) as second:
            second.begin()
            assert second.blocked == {"k"}
    with FenceTicket(stops) as third:
        third.begin()
        assert third.blocked == set()


def test_a_call_made_before_the_failed_one_returned_is_blocked_even_if_it_begins_later() -> None:
    stops = KeyFence()
    first = FenceTicket(stops)
    with first:
        first.begin()
        first.stop("k")
        waiting = FenceTicket(stops)
    with waiting:
        waiting.begin()
        assert waiting.blocked == {"k"}


def test_a_blocked_call_blocks_later_ones() -> None:
    stops = KeyFence()
    second = FenceTicket(stops)
    with second:
        with FenceTicket(stops) as first:
            first.begin()
            first.stop("k")
        second.begin()
        second.stop("k")
        with FenceTicket(stops) as third:
            third.begin()
            assert third.blocked == {"k"}


def test_a_block_lasts_for_the_whole_call() -> None:
    stops = KeyFence()
    first, second = FenceTicket(stops), FenceTicket(stops)
    with second:
        with first:
            first.begin()
            first.stop("k")
            second.begin()
        assert second.blocked == {"k"}


def test_a_call_that_has_begun_is_not_blocked_by_others() -> None:
    stops = KeyFence()
    with FenceTicket(stops) as first, FenceTicket(stops) as second:
        first.begin()
        second.stop("k")
        assert first.blocked == set()
        assert not first.is_sole("k")


def test_a_message_without_a_key_blocks_no_call() -> None:
    stops = KeyFence()
    with FenceTicket(stops) as first:
        first.begin()
        first.stop(None)
        with FenceTicket(stops) as second:
            second.begin()
            assert second.blocked == set()


def test_a_failure_after_the_return_of_its_call_blocks_no_call() -> None:
    stops = KeyFence()
    with FenceTicket(stops) as cancelled:
        cancelled.begin()
    cancelled.stop("k")
    with FenceTicket(stops) as next_call:
        next_call.begin()
        assert next_call.blocked == set()


def test_a_call_that_was_never_awaited_is_released() -> None:
    stops = KeyFence()
    FenceTicket(stops)
    with FenceTicket(stops) as first:
        first.begin()
        first.stop("k")
    assert len(stops) == 0
