"""Patterns: the same meaning in Python and in SQL."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_spec import Pattern

ALPHABET = st.sampled_from("ab*?.%_\\\n")
TEXTS = st.text(st.sampled_from("ab.%_\\\n*?"), max_size=12)
PATTERNS = st.text(ALPHABET, min_size=1, max_size=8)


def sql_like(value: str, like: str) -> bool:
    """What Postgres' LIKE means, written down plainly."""
    if not like:
        return not value
    if like[0] == "%":
        return any(sql_like(value[skip:], like[1:]) for skip in range(len(value) + 1))
    if not value:
        return False
    if like[0] == "\\":
        return value[0] == like[1] and sql_like(value[1:], like[2:])
    return (like[0] == "_" or like[0] == value[0]) and sql_like(value[1:], like[1:])


@given(PATTERNS, TEXTS)
def test_matches_what_the_shell_matches(text: str, value: str) -> None:
    assert Pattern(text).matches(value) is fnmatch.fnmatchcase(value, text)


@given(PATTERNS, TEXTS)
def test_means_the_same_in_sql(text: str, value: str) -> None:
    pattern = Pattern(text)
    assert sql_like(value, pattern.like()) is pattern.matches(value)


@given(PATTERNS, TEXTS)
def test_a_literal_matches_itself_only(text: str, value: str) -> None:
    pattern = Pattern(text)
    assert pattern.is_literal is (not re.search(r"[*?]", text))
    if pattern.is_literal:
        assert pattern.matches(text)
        assert pattern.matches(value) is (value == text)


@pytest.mark.parametrize(
    ("text", "like"),
    [("order.*", "order.%"), ("a?c", "a_c"), ("100%_\\", r"100\%\_\\"), ("*", "%"), ("order.placed", "order.placed")],
)
def test_like_escapes_what_sql_takes_for_wildcards(text: str, like: str) -> None:
    assert Pattern(text).like() == like
    assert str(Pattern(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("order.[ab]", '"order.[ab]": character classes ([...]) are not supported: use * and ?'),
        ("", 'an empty pattern matches nothing: remove it, or write "*"'),
        ("a\0b", "NUL"),
        ("a" * 513, "at most 512 characters"),
    ],
)
def test_refuses_what_sql_could_not_express(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Pattern(text)


@pytest.mark.timeout(10)
def test_many_stars_do_not_make_it_slow() -> None:
    assert not Pattern("*a" * 200 + "b").matches("a" * 5000)


def test_equal_patterns_are_one() -> None:
    assert {Pattern("a*"), Pattern("a*")} == {Pattern("a*")}
