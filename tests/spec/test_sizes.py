"""Sizes: Kubernetes quantities, in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_spec.scalars import Size


@pytest.mark.parametrize(
    ("text", "size", "canonical"),
    [
        ("10Gi", 10 * 2**30, "10Gi"),
        ("500M", 500 * 10**6, "500M"),
        ("1k", 1000, "1k"),
        ("1024", 1024, "1Ki"),
        ("1.5Gi", 3 * 2**29, "1536Mi"),
        ("0.1Ki", 103, "103"),
        ("1048576Ki", 2**30, "1Gi"),
        ("0", 0, "0"),
    ],
)
def test_reads_quantities(text: str, size: int, canonical: str) -> None:
    assert Size.parse(text).bytes == size
    assert str(Size.parse(text)) == canonical


@pytest.mark.parametrize("text", ["", "10GB", "10 Gi", "10gi", "100m", "-1", "1e3", "Gi", "1.Gi"])
def test_refuses_the_rest(text: str) -> None:
    with pytest.raises(ValueError, match='not a size: write it like "10Gi"'):
        Size.parse(text)


def test_refuses_more_than_any_disk_holds() -> None:
    with pytest.raises(ValueError, match="between 0 and 8Ei"):
        Size.parse("8Ei")


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_a_printed_value_parses_to_the_same_value(size: int) -> None:
    assert Size.parse(str(Size(size))).bytes == size
