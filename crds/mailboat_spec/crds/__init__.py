"""The CustomResourceDefinitions of Mailboat, generated from the models.

Contains the translation of pydantic's JSON Schema into structural schemas (``openapi_schema``), the printer columns of
``kubectl get`` (``columns``), the definitions (``definitions``), the JSON Schema for
editors (``editor_schema``) and the Markdown reference (``reference``). CEL rules
are defined beside the Python checks that they repeat (``admission_rules`` of the models). YAML is written by
``crds/generate.py``.
"""

from mailboat_spec.crds.definitions import Definition, definitions
from mailboat_spec.crds.editor_schema import json_schema

__all__ = ["Definition", "definitions", "json_schema"]
