"""The CustomResourceDefinitions of Mailboat, made from the models.

Lives here: the way from pydantic's JSON Schema to what the API server takes (``structural``), what ``kubectl get``
prints (``columns``), the definitions themselves (``definitions``) and the reference for people (``reference``). Does
not live here: rules, which stand beside the checks that they repeat (``admission_rules`` of the models), and YAML,
which ``crds/generate.py`` writes.
"""

from mailboat_spec.crds.definitions import Definition, definitions

__all__ = ["Definition", "definitions"]
