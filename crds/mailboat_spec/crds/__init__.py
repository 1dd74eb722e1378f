"""The CustomResourceDefinitions of Mailboat, generated from the models.

Contains the translation of pydantic's JSON Schema into structural schemas (``openapi_schema``), the printer columns of
``kubectl get`` (``columns``), the definitions (``definitions``), the JSON Schema for editors (``editor_schema``) and
the Markdown reference (``reference``). CEL rules come from the models (``constraints`` and ``admission_rules``).
``crds/generate.py`` writes the YAML.
"""

from mailboat_spec.crds.definitions import Definition, definitions
from mailboat_spec.crds.editor_schema import json_schema

__all__ = ["Definition", "definitions", "json_schema"]
