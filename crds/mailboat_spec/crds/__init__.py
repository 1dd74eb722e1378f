"""The CustomResourceDefinitions of Mailboat, generated from the models.

Contains the translation of pydantic's JSON Schema into structural schemas (``openapi_schema``), the definitions with
printer columns and the JSON Schema for editors (``definitions``), and the Markdown reference (``reference``). CEL rules
come from the models (``constraints`` and ``admission_rules``). ``crds/generate.py`` writes the YAML.
"""

from mailboat_spec.crds.definitions import Definition, definitions, json_schema

__all__ = ["Definition", "definitions", "json_schema"]
