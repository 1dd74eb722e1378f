"""Patterns have the same meaning in Python and in SQL."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_devservers.postgres import PostgresServer
from mailboat_spec import Pattern

ALPHABET = st.sampled_from("ab*?.%_\\\n")
TEXTS = st.text(st.sampled_from("ab.%_\\\n*?"), max_size=12)
PATTERNS = st.text(ALPHABET, min_size=1, max_size=8)


def words_of(alphabet: str, longest: int) -> Iterator[str]:
    for length in range(longest + 1):
        yield from map("".join, itertools.product(alphabet, repeat=length))


@given(PATTERNS, TEXTS)
def test_matches_the_same_names_as_the_shell(text: str, value: str) -> None:
    assert Pattern(text).matches(value) is fnmatch.fnmatchcase(value, text)


def test_means_the_same_in_postgres(postgres: PostgresServer) -> None:
    patterns = [Pattern(text) for text in words_of("a*?%_\\", longest=4) if text]
    values = list(words_of("a%_\\\n", longest=3))
    with psycopg.connect(postgres.url()) as connection:
        found = connection.execute(
            "select shape.n - 1, array_agg(value.n - 1 order by value.n)"
            " from unnest(%s::text[]) with ordinality shape (text, n)"
            " cross join unnest(%s::text[]) with ordinality value (text, n)"
            " where value.text like shape.text group by shape.n",
            ([pattern.like() for pattern in patterns], values),
        ).fetchall()
    in_postgres = {patterns[shape]: [values[value] for value in matching] for shape, matching in found}
    for pattern in patterns:
        assert in_postgres.get(pattern, []) == [value for value in values if pattern.matches(value)], pattern


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
def test_like_escapes_the_wildcards_of_sql(text: str, like: str) -> None:
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
def test_refuses_patterns_that_sql_could_not_express(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Pattern(text)


@pytest.mark.timeout(60)
def test_many_wildcards_do_not_make_it_slow() -> None:
    assert not Pattern("*a" * 200 + "b").matches("a" * 5000)


def test_equal_patterns_are_one() -> None:
    assert {Pattern("a*"), Pattern("a*")} == {Pattern("a*")}
