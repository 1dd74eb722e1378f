"""Durations: Go's notation, parsed and printed exactly."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_spec import Duration
from mailboat_spec.scalars import between

UNITS = {"h": 3_600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


@pytest.mark.parametrize(
    ("text", "seconds", "canonical"),
    [
        ("720h", 2_592_000.0, "720h"),
        ("500ms", 0.5, "500ms"),
        ("1m30s", 90.0, "1m30s"),
        ("90s", 90.0, "1m30s"),
        ("60s", 60.0, "1m"),
        ("1.5s", 1.5, "1.5s"),
        ("1.5h", 5400.0, "1h30m"),
        ("0.5h", 1800.0, "30m"),
        (".5s", 0.5, "500ms"),
        ("1.s", 1.0, "1s"),
        ("1500us", 0.0015, "1.5ms"),
        ("2µs", 2e-6, "2us"),
        ("2μs", 2e-6, "2us"),
        ("7ns", 7e-9, "7ns"),
        ("1m500ms", 60.5, "1m0.5s"),
        ("0", 0.0, "0s"),
        ("0s", 0.0, "0s"),
        ("0h0m0s", 0.0, "0s"),
    ],
)
def test_reads_durations_of_go_and_prints_them_canonically(text: str, seconds: float, canonical: str) -> None:
    duration = Duration.parse(text)
    assert duration.seconds == pytest.approx(seconds, rel=1e-12)
    assert str(duration) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("30", 'a duration needs a unit: write "30s" for seconds'),
        ("1.5", 'a duration needs a unit: write "1.5s" for seconds'),
        ("30d", 'days and weeks are not known as units: write "720h"'),
        ("2 weeks", 'days and weeks are not known as units: write "336h"'),
        ("", "not a duration"),
        ("h", "not a duration"),
        ("1h 30m", "not a duration"),
        ("-1s", "not a duration"),
        ("1S", "not a duration"),
        ("1s" * 40, "not a duration"),
        ("9999999h", "between 0s and 2562047h"),
    ],
)
def test_other_values_are_refused_with_the_valid_form(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Duration.parse(text)


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_a_printed_value_parses_to_the_same_value(nanoseconds: int) -> None:
    duration = Duration(nanoseconds)
    assert Duration.parse(str(duration)) == duration


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(sorted(UNITS))), min_size=1, max_size=6))
def test_parts_add_up(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{count}{unit}" for count, unit in parts)
    assert Duration.parse(text).nanoseconds == sum(count * UNITS[unit] for count, unit in parts)


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_durations_compare_by_length(one: int, other: int) -> None:
    assert (Duration(one) < Duration(other)) is (one < other)


def test_seconds_round_to_the_nearest_nanosecond() -> None:
    assert Duration.of_seconds(0.1) == Duration.parse("100ms")


def test_bounds_are_inclusive() -> None:
    bounds = between("1s", "10m")
    assert [str(bounds.check(Duration.parse(text))) for text in ("1s", "10m")] == ["1s", "10m"]
    with pytest.raises(ValueError, match=r"must be between 1s and 10m, not 999\.999999ms"):
        bounds.check(Duration(10**9 - 1))
    with pytest.raises(ValueError, match=r"must be between 1s and 10m, not 10m1s"):
        bounds.check(Duration.parse("601s"))
