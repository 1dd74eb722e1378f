"""Detect drift of a child from its desired state. Pure; the differences become the text of the event.

Three checks, without annotations on the object. The last two use ``managedFields``, in which server-side apply tracks
the owner of each field:

- Are all desired fields present, with the desired values? Fields added by others are ignored.
- Does the operator still own them? Another manager that changes an atomic field (a selector) becomes its owner, even if
  the operator's part of it is unchanged.
- Does the operator own a field that is no longer desired?

The API server normalizes some values (``1000m`` cpu to ``1``). ``outcome`` records the result of the operator's own
apply; an object that still matches it needs no further apply.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mailboat_spec.names import FIELD_MANAGER


@dataclass(frozen=True, slots=True)
class Applied:
    """A desired object and the result of applying it."""

    wanted: str
    found: str
    reasons: tuple[str, ...]
    """Differences that remain after the operator's own apply: normalized values."""


def differences(desired: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Return the differences as sentences; empty if there is nothing to do."""
    owned = _owned(live)
    return [*_missing(desired, live, ""), *_taken_over(desired, owned), *_unwanted(owned, desired, "")]


def outcome(desired: Mapping[str, Any], live: Mapping[str, Any]) -> Applied:
    """Return the state for comparison with the result of the last apply."""
    return Applied(_hash(desired), _hash(_projected(desired, live)), tuple(differences(desired, live)))


def _missing(desired: Any, live: Any, path: str) -> Iterator[str]:
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            yield f"{path} is missing"
            return
        for key, value in desired.items():
            where = f"{path}.{key}" if path else key
            if key not in live:
                if not _says_nothing(value):
                    yield f"{where} is missing"
            else:
                yield from _missing(value, live[key], where)
    elif _is_list(desired):
        if not _is_list(live) or len(live) < len(desired):
            yield f"{path} has entries that are missing"
            return
        for index, (wanted, found) in enumerate(_paired(desired, live)):
            yield from _missing(wanted, found, f"{path}[{_entry(wanted, index)}]")
    elif desired != live:
        yield f"{path} was changed"


def _paired(desired: Sequence[Any], live: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pair entries by name if they have one, since others may have inserted entries between them."""
    named = {entry["name"]: entry for entry in live if isinstance(entry, Mapping) and "name" in entry}
    for index, wanted in enumerate(desired):
        if isinstance(wanted, Mapping) and "name" in wanted and named:
            yield wanted, named.get(wanted["name"])
        else:
            yield wanted, live[index]


def _entry(wanted: Any, index: int) -> object:
    return wanted["name"] if isinstance(wanted, Mapping) and "name" in wanted else index


def _owned(live: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields applied by the operator, in the notation of ``managedFields``."""
    for entry in live.get("metadata", {}).get("managedFields") or ():
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource"):
            fields: Mapping[str, Any] = entry.get("fieldsV1") or {}
            return fields
    return {}


def _taken_over(desired: Mapping[str, Any], owned: Mapping[str, Any]) -> Iterator[str]:
    if not owned:
        yield "it is not managed by Mailboat any more"
        return
    for part, value in desired.items():
        if part == "metadata":
            value = {name: each for name, each in value.items() if name not in ("name", "namespace")}
        elif part in ("apiVersion", "kind"):
            continue
        yield from _not_ours(value, owned.get(f"f:{part}"), part)


def _not_ours(desired: Any, owned: Mapping[str, Any] | None, path: str) -> Iterator[str]:
    """Walk the manifest and the owned fields in parallel, and yield fields that are no longer owned."""
    if owned is None:
        if not _says_nothing(desired):
            yield f"{path} was taken over by somebody else"
    elif owned and isinstance(desired, Mapping):
        for name, value in desired.items():
            yield from _not_ours(value, owned.get(f"f:{name}"), f"{path}.{name}")
    elif owned and _is_list(desired):
        marks = [(step[0], json.loads(step[2:]), below) for step, below in owned.items() if step[:2] in ("k:", "v:")]
        for index, entry in enumerate(desired):
            below = next((below for mark, value, below in marks if _entry_of([entry], mark, value) is not None), None)
            yield from _not_ours(entry, below, f"{path}[{_entry(entry, index)}]")


def _unwanted(fields: Mapping[str, Any], desired: Any, path: str) -> Iterator[str]:
    """Walk the owned fields and the manifest in parallel: each owned field must still be desired."""
    for step, below in fields.items():
        if step == ".":
            continue
        mark, _, name = step.partition(":")
        where = f"{path}.{name}" if path else name
        if mark == "f":
            if not isinstance(desired, Mapping) or name not in desired:
                yield f"{where} is no longer wanted"
            else:
                yield from _unwanted(below, desired[name], where)
        elif mark in ("k", "v"):
            found = _entry_of(desired, mark, json.loads(name))
            if found is None:
                yield f"{path}[{name}] is no longer wanted"
            else:
                yield from _unwanted(below, found, f"{path}[{name}]")


def _entry_of(desired: Any, mark: str, wanted: Any) -> Any:
    for entry in desired if _is_list(desired) else ():
        if mark == "v" and entry == wanted:
            return entry
        if mark == "k" and isinstance(entry, Mapping) and all(entry.get(key) == wanted[key] for key in wanted):
            return entry
    return None


def _projected(desired: Any, live: Any) -> Any:
    """Return the part of the live object that the desired one covers."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return {key: _projected(value, live.get(key)) for key, value in desired.items()}
    if _is_list(desired) and _is_list(live) and len(live) >= len(desired):
        return [_projected(wanted, found) for wanted, found in _paired(desired, live)]
    return live


def _says_nothing(value: Any) -> bool:
    """Return whether the API server omits the value: empty lists and maps, and false."""
    return value is False or value in ({}, [], None)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
