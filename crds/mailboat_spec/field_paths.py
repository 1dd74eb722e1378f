"""Lookup of fields and types in the models by YAML path.

Used for hints in error messages: "did you mean ...", "it belongs in ...".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from mailboat_spec.base import Model, yaml_name

Step = str | int


def yaml_fields(model: type[Model]) -> dict[str, FieldInfo]:
    """Return the fields of a model by YAML name."""
    return {yaml_name(attribute): field for attribute, field in model.model_fields.items()}


def type_at(root: type[Model], path: Sequence[Step]) -> Any:
    """Return the type expected at a path, or None if the path leaves the models."""
    here: Any = root
    for step in path:
        here = _bare(here)
        if _is_model(here):
            field = yaml_fields(here).get(str(step))
            here = field.annotation if field else None
        elif get_args(here):  # tuple[X, ...] or Mapping[str, X]
            here = get_args(here)[0] if isinstance(step, int) else get_args(here)[-1]
        else:
            return None
    return _bare(here)


def field_at(root: type[Model], path: Sequence[Step]) -> FieldInfo | None:
    """Return the field at a path, or None."""
    if not path or not _is_model(model := type_at(root, path[:-1])):
        return None
    return yaml_fields(model).get(str(path[-1]))


def model_at(root: type[Model], path: Sequence[Step]) -> type[Model] | None:
    """Return the model at a path, or None if the type there is no model."""
    found = type_at(root, path)
    return found if _is_model(found) else None


def paths_to(root: type[Model], name: str) -> Iterator[tuple[str, ...]]:
    """Yield all paths below a model whose last step equals ``name`` up to case and separators. Lists are skipped."""
    for alias, field in yaml_fields(root).items():
        if _plain(alias) == _plain(name):
            yield (alias,)
        if _is_model(below := _bare(field.annotation)):
            for path in paths_to(below, name):
                yield (alias, *path)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to ``name``, ignoring case and separators; None if none is close."""
    by_plain = {_plain(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.7)
    return by_plain[close[0]] if close else None


def spelled(path: Sequence[Step]) -> str:
    """Return a path for messages: ``spec.filter.eventTypes[1]``, ``spec.sink.kafka.config["linger.ms"]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier():
            text += f".{step}" if text else step
        else:
            text += f'["{step}"]'
    return text


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, Model)


def _bare(annotation: Any) -> Any:
    """Return the type without ``Annotated`` and ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif NoneType in get_args(annotation):
            annotation = next(argument for argument in get_args(annotation) if argument is not NoneType)
        else:
            return annotation
