"""Base classes of all models: field names, strictness, and errors about wrong combinations of fields.

Attributes are snake_case in Python and camelCase in YAML. The docstring of an attribute is the field's description in
the CRDs. Objects are frozen, unknown fields are refused, and values never appear in pydantic's own error messages (a
value might be a password).
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mailboat_spec.rules import RULES, Constraint, Refusal, Refused, Rule


def one_line(docstring: str) -> str:
    """Return a field's description without line breaks."""
    return " ".join(docstring.split())


def yaml_name(attribute: str) -> str:
    """Return the YAML name: ``batch_size`` -> ``batchSize``; ``from_`` (a Python keyword) -> ``from``."""
    return to_camel(attribute.rstrip("_"))


class Model(BaseModel):
    """Base of all models that are read from a manifest."""

    model_config = ConfigDict(
        alias_generator=yaml_name,
        validate_by_name=True,  # for Python code; manifests are read by alias only (see documents.py)
        validate_by_alias=True,
        serialize_by_alias=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    constraints: ClassVar[tuple[Constraint, ...]] = ()
    """Conditions on several fields, and on changes of a field."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        """Treat null (``filter:`` without a value) as an absent field, as the API server does."""
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if value is not None}
        return data

    @model_validator(mode="after")
    def _refuse_wrong_combinations(self) -> Self:
        if refusals := tuple(self.wrong_combinations()):
            raise Refused(*refusals)
        return self

    def wrong_combinations(self) -> Iterator[Refusal]:
        """Yield refusals of fields that are valid individually but not together. Override to add further ones."""
        yield from (each.refusal(self) for each in self.constraints if not each.valid.evaluate(self))

    @classmethod
    def admission_rules(cls) -> Iterator[Rule]:
        """Yield the same checks as CEL rules. Override to add further ones."""
        yield from (each.rule() for each in cls.constraints)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        written = handler(schema)
        for field in handler.resolve_ref_schema(written).get("properties", {}).values():
            if "description" in field:
                field["description"] = one_line(field["description"])
        if rules := list(cls.admission_rules()):
            handler.resolve_ref_schema(written)[RULES] = rules
        return written

    def manifest(self) -> dict[str, Any]:
        """Return a plain mapping for YAML or JSON without absent fields. Parsing it gives an equal object."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(Model):
    """Base of status models: unknown fields, perhaps of a newer version, are ignored instead of refused."""

    model_config = ConfigDict(extra="ignore")
