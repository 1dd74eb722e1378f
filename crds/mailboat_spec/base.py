"""What all models have in common: how fields are spelled, how strict they are, how wrong combinations are told.

Attributes are snake_case in Python and camelCase in YAML. Objects are frozen, unknown fields are refused, and values
never appear in pydantic's own error texts (one of them might be a password).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mailboat_spec.admission import RULES, Rule


@dataclass(frozen=True, slots=True)
class Refusal:
    """One wrong combination of fields: where (in YAML spelling, below the model that says it), what, and what to do."""

    path: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.message}" if self.path else self.message


class Refused(ValueError):
    """Raised inside pydantic's validation with all refusals of one model at once, so that a person sees all of them."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = refusals


def yaml_name(attribute: str) -> str:
    """``batch_size`` -> ``batchSize``; ``from_`` (a Python keyword) -> ``from``."""
    return to_camel(attribute.rstrip("_"))


class Model(BaseModel):
    """The base of everything that is read from a manifest."""

    model_config = ConfigDict(
        alias_generator=yaml_name,
        validate_by_name=True,  # for Python code; manifests are read by alias only (see reading.py)
        validate_by_alias=True,
        serialize_by_alias=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        """``filter:`` with nothing behind it means that the field was not given, as it does to the API server."""
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if value is not None}
        return data

    @model_validator(mode="after")
    def _refuse_wrong_combinations(self) -> Self:
        refusals = tuple(self.wrong_combinations())
        if refusals:
            raise Refused(*refusals)
        return self

    def wrong_combinations(self) -> Iterator[Refusal]:
        """Fields that are right each on its own and wrong together. Overridden where there are any."""
        yield from ()

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        """The same for the API server, and what must not change in an update. Overridden where there are any."""
        yield from ()

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        written = handler(schema)
        if rules := [rule.as_schema() for rule in cls.admission_rules()]:
            handler.resolve_ref_schema(written)[RULES] = rules
        return written

    def manifest(self) -> dict[str, Any]:
        """The plain mapping to write as YAML or JSON, without what is absent. Reads back to an equal object."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(Model):
    """The base of what is only ever reported: fields of a newer version are passed over instead of refused."""

    model_config = ConfigDict(extra="ignore")
