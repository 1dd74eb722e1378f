"""Who is blocked by a failure, and for how long."""

from __future__ import annotations

from mailboat.sinks.key_fence import KeyFence


def test_a_call_that_begins_while_a_key_is_stopped_is_blocked_and_later_ones_are_not() -> None:
    stops = KeyFence()
    with stops.call() as first:
        first.begin()
        first.stop("k")
        with stops.call() as second:
            second.begin()
            assert second.blocked == {"k"}
    with stops.call() as third:
        third.begin()
        assert third.blocked == set()


def test_a_call_made_before_the_failed_one_returned_is_blocked_even_if_it_begins_after() -> None:
    stops = KeyFence()
    first = stops.call()
    with first:
        first.begin()
        first.stop("k")
        waiting = stops.call()
    with waiting:
        waiting.begin()
        assert waiting.blocked == {"k"}


def test_a_blocked_call_blocks_those_behind_it() -> None:
    stops = KeyFence()
    second = stops.call()
    with second:
        with stops.call() as first:
            first.begin()
            first.stop("k")
        second.begin()
        second.stop("k")
        with stops.call() as third:
            third.begin()
            assert third.blocked == {"k"}


def test_a_block_lasts_for_the_whole_call() -> None:
    stops = KeyFence()
    first, second = stops.call(), stops.call()
    with second:
        with first:
            first.begin()
            first.stop("k")
            second.begin()
        assert second.blocked == {"k"}


def test_a_message_without_a_key_stops_nobody() -> None:
    stops = KeyFence()
    with stops.call() as first:
        first.begin()
        first.stop(None)
        with stops.call() as second:
            second.begin()
            assert second.blocked == set()


def test_answers_that_come_after_a_call_has_returned_stop_nothing() -> None:
    stops = KeyFence()
    with stops.call() as cancelled:
        cancelled.begin()
    cancelled.stop("k")
    with stops.call() as next_call:
        next_call.begin()
        assert next_call.blocked == set()


def test_a_call_that_was_made_and_never_awaited_is_forgotten() -> None:
    stops = KeyFence()
    stops.call()
    with stops.call() as first:
        first.begin()
        first.stop("k")
    assert len(stops._waiting) == 0
