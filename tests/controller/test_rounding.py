"""Rounding of status values: a value changes only in steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_operator.status.display import displayed, rounded_age, rounded_count, rounded_rate


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_count_is_rounded_once_keeps_its_order_and_is_never_far_off(one, other):
    rounded = rounded_count(one)
    assert rounded_count(rounded) == rounded
    assert rounded <= one < rounded * 1.1 + 1
    assert one > 100 or rounded == one
    if one <= other:
        assert rounded <= rounded_count(other)


@given(st.floats(0, 10**9), st.floats(0, 10**9))
def test_an_age_is_rounded_once_and_keeps_its_order(one, other):
    rounded = rounded_age(one)
    assert rounded_age(rounded) == rounded
    assert (rounded or 0) <= one
    if one <= other:
        assert (rounded or 0) <= (rounded_age(other) or 0)


@given(st.floats(0, 10**9))
def test_a_rate_is_rounded_once(rate):
    assert rounded_rate(rounded_rate(rate)) == rounded_rate(rate)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, None), (0.5, None), (1.9, 1), (89, 60), (7300, 7200), (10**9, 31536000)]
)
def test_an_age_is_rounded_in_steps(seconds, shown):
    assert rounded_age(seconds) == shown


@pytest.mark.parametrize(("rate", "shown"), [(0.04, 0.0), (12.345, 12.0), (1234.5, 1200.0), (float("nan"), 0.0)])
def test_a_rate_has_two_digits(rate, shown):
    assert rounded_rate(rate) == shown


def test_counting_that_stopped_is_shown_by_a_plus():
    assert (displayed(100_000, True), displayed(12, False)) == ("100000+", "12")
