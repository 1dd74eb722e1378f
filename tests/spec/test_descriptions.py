"""Every field has a description: CRDs, ``kubectl explain`` and error messages use it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import mailboat_spec
from mailboat_spec import ConditionType, Duration, EventSubscription, OutboxRelay, Reason
from mailboat_spec.base import Model, one_line
from mailboat_spec.resources.template import Toleration
from mailboat_spec.validation_errors import field_at, model_at, nearest, paths_to, spelled


def every_field() -> Iterator[tuple[str, FieldInfo]]:
    seen: set[type[Model]] = set()
    waiting: list[type[Model]] = [Model]
    while waiting:
        model = waiting.pop()
        waiting.extend(model.__subclasses__())
        if model not in seen and model.__module__.startswith("mailboat_spec."):
            seen.add(model)
            yield from ((f"{model.__name__}.{name}", field) for name, field in model.model_fields.items())


FIELDS = dict(every_field())


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS.keys())
def test_a_field_has_a_description_with_its_default(field: FieldInfo) -> None:
    text = one_line(field.description or "")
    assert text.endswith(".")
    assert field.is_required() is ("Default: " not in text)
    if isinstance(field.default, BaseModel | tuple) or field.default in (None, "") or field.is_required():
        return
    if field.default_factory is None:
        assert f"Default: {as_written(field.default)}" in text


def as_written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Duration):
        return "60s" if default == Duration.parse("60s") else str(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_there_are_fields_to_check() -> None:
    assert {"Delivery.batch_size", "Wake.notify", "KafkaSink.topic", "Condition.type"} <= FIELDS.keys()


@pytest.mark.parametrize("words", [ConditionType, Reason])
def test_conditions_and_reasons_are_camel_case_words(words: type[StrEnum]) -> None:
    assert all(word.isalpha() and word[0].isupper() for word in words)


def test_a_reason_is_named_by_its_value() -> None:
    assert all(reason.name.replace("_", "").lower() == reason.value.lower() for reason in [*Reason, *ConditionType])


def test_exported_names_exist() -> None:
    assert all(hasattr(mailboat_spec, name) for name in mailboat_spec.__all__)
    assert len(set(mailboat_spec.__all__)) == len(mailboat_spec.__all__)


def test_fields_are_found_by_their_path() -> None:
    found = field_at(EventSubscription, ("spec", "delivery", "backoff", "initial"))
    assert found is not None
    assert found.default == Duration.parse("1s")
    assert field_at(EventSubscription, ("spec", "nowhere", "initial")) is None
    assert field_at(EventSubscription, ()) is None
    toleration = model_at(OutboxRelay, ("spec", "template", "tolerations", 0))
    assert toleration is Toleration
    assert model_at(OutboxRelay, ("spec", "template", "labels", "a")) is None
    assert list(paths_to(EventSubscription, "batch-size")) == [("spec", "delivery", "batchSize")]


@pytest.mark.parametrize(
    ("given", "candidates", "meant"),
    [
        ("backof", ["batchSize", "backoff", "timeout"], "backoff"),
        ("batch_size", ["batchSize", "backoff"], "batchSize"),
        ("MAXATTEMPTS", ["maxAttempts"], "maxAttempts"),
        ("zebra", ["batchSize", "backoff"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_name(given: str, candidates: list[str], meant: str | None) -> None:
    assert nearest(given, candidates) == meant


def test_paths_are_spelled_with_dots_and_brackets() -> None:
    assert spelled(("spec", "filter", "eventTypes", 1)) == "spec.filter.eventTypes[1]"
    assert spelled(("spec", "config", "linger.ms")) == 'spec.config["linger.ms"]'
    assert spelled(()) == ""
