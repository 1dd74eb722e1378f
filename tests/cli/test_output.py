"""Format of ages, columns, text and JSON on a terminal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat.cli.output import age, columns, reindented, safe, shortened


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0s"), (0.4, "0s"), (59.4, "59s"), (60, "1m"), (192, "3m12s"), (7500, "2h5m"), (273600, "3d4h")],
)
def test_ages_have_two_units_at_most(seconds, text):
    assert age(seconds) == text


def test_columns_are_aligned_and_safe():
    assert columns(("ID", "NAME"), [("1", "a\nb"), ("10", "\x1b[2J")]) == ["ID   NAME", "1    a\\x0ab", "10   \\x1b[2J"]


@given(st.text())
def test_safe_text_has_no_control_characters(text):
    assert safe(text).isprintable()
    assert "\x1b" not in safe(text, lines=True)


def test_a_long_text_is_one_line():
    assert shortened("a\n b" * 10, 8) == "a ba ..."


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(json_values)
def test_indented_json_is_equivalent_and_equal_to_the_output_of_json(value):
    assert reindented(json.dumps(value)) == json.dumps(value, indent=2)


def test_numbers_keep_their_written_form():
    assert reindented('{"total":12.50,"n":1e400}') == '{\n  "total": 12.50,\n  "n": 1e400\n}'
