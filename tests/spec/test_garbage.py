"""Arbitrary file content gives a valid set or a readable error, never another exception."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from mailboat_spec import Manifests, SpecError, read_documents

DOCUMENTED: list[dict[str, Any]] = list(yaml.safe_load_all((Path(__file__).parent / "design.yaml").read_text()))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=3)
    | st.sampled_from([date(2026, 1, 31), datetime(2026, 1, 31, tzinfo=UTC), "1h", "a:1", "*", "\0", "9" * 5000, "Ⅷh"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def paths(value: object, here: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield here
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths(inner, (*here, name))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*here, index))


PLACES = [path for path in paths(DOCUMENTED) if len(path) > 1]


def read(documents: list[Any]) -> Manifests | SpecError:
    try:
        return read_documents((f"document {number}", body) for number, body in enumerate(documents, start=1))
    except SpecError as refused:
        return refused


@given(st.lists(ANYTHING, max_size=3))
def test_any_document_is_read_or_refused(documents: list[Any]) -> None:
    answer = read(documents)
    if isinstance(answer, SpecError):
        assert all(problem.source.startswith("document ") and problem.message for problem in answer.problems)
    else:
        assert answer == Manifests((), ())


@given(st.sampled_from(PLACES), ANYTHING)
def test_anything_in_any_field_is_read_or_refused(place: tuple[str | int, ...], value: object) -> None:
    documents = copy.deepcopy(DOCUMENTED)
    here: Any = documents
    for step in place[:-1]:
        here = here[step]
    here[place[-1]] = value
    answer = read(documents)
    if isinstance(answer, Manifests):
        written = [resource.manifest() for resource in (*answer.relays, *answer.subscriptions)]
        assert read_documents((str(number), body) for number, body in enumerate(written)) == answer
