"""Generate the CRDs and the reference of both resources from the models: ``make crds``.

A development tool, outside the package: the package itself does not depend on YAML. A test compares the committed files
with the output of ``files``.

The Markdown reference has one section per mapping, with its fields in the order of the models and the refused
combinations of fields. Rules on the format of a single string are left out: their messages explain the format.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from mailboat_spec.crds import Definition, Schema, definitions
from mailboat_spec.rules import RULES

ROOT: Final = Path(__file__).parent.parent
_CHART: Final = ROOT / "charts" / "mailboat" / "files" / "crds"
"""Copies for Helm, which can't read files outside a chart."""
_HEADER: Final = "# Made from the models in crds/mailboat_spec by `make crds`: change those, not this file.\n"
_INTRODUCTION: Final = """\
# The resources

`make crds` generates this page from the models; `kubectl explain` shows the same. `mailboat run -f` reads the same
manifests. Complete manifests are in [examples](../examples/kubernetes).

Durations have the format of Go (`720h`, `1m30s`, `500ms`; there is no unit for days), sizes that of Kubernetes
(`10Gi`). The API server fills in defaults, so `kubectl get -o yaml` shows the values in use. The only exception is
`OutboxRelay.spec.replicas`: the operator applies its default, because a Sidecar must not have the field.

The API server refuses invalid resources with the messages under *Refused*. It can't detect all of them. The operator
reports the following ones as `Ready: False` with the reason `InvalidSpec`, and changes nothing in the cluster:

- a secret in `sink.custom.config`, because only that sink defines the format;
- a secret with a name in camelCase (`passwordHash`);
- a private key as the value of a setting whose name does not suggest a secret;
- a URL whose parameter `password` is percent-encoded.

Two rules apply only to the API server. It refuses duplicates in lists (`bootstrapServers`, `eventTypes`,
`aggregateTypes`, `tags`), and times in another format than `2026-01-31T12:00:00Z`. `mailboat run` accepts both.
"""


class _Readable(yaml.SafeDumper):
    """YAML dumper for human readers: lists are indented below their key, aliases are expanded."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def files() -> dict[Path, str]:
    """Return the expected content of every generated file, by path."""
    written = {}
    for definition in definitions():
        body = yaml.dump(definition.manifest(), Dumper=_Readable, sort_keys=False, width=118, allow_unicode=True)
        for folder in (ROOT / "crds", _CHART):
            written[folder / f"{definition.plural}.yaml"] = _HEADER + body
    sections = (line for definition in definitions() for line in _of_kind(definition))
    written[ROOT / "docs" / "resources.md"] = "\n".join((_INTRODUCTION, *sections))
    return written


def main() -> None:
    """Write the files that differ and print their paths."""
    for path, text in files().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


def _of_kind(definition: Definition) -> Iterator[str]:
    schema = definition.schema()
    yield f"## {definition.kind}\n\n{schema['description']} Short name: `{definition.short_name}`.\n"
    yield from _rules(schema)
    for part in ("spec", "status"):
        yield from _section(definition.kind, part, schema["properties"][part])


def _section(kind: str, path: str, schema: Schema) -> Iterator[str]:
    yield f"### {kind}: `{path}`\n\n{schema['description']}\n\n| field | type | |\n|---|---|---|"
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        marked = f"`{name}`" + (" (required)" if name in required else "")
        kind_of_value = f"`{{{', '.join(field['properties'])}}}`" if _is_reference(name) else _type(field)
        yield f"| {marked} | {kind_of_value} | {field['description'].replace('|', chr(92) + '|')} |"
    yield ""
    yield from _rules(schema)
    for name, field in schema["properties"].items():
        inside = field.get("items", field)
        if "properties" in inside and not _is_reference(name):
            below = f"{path}.{name}" + ("[]" if inside is not field else "")
            yield from _section(kind, below, {**inside, "description": field["description"]})


def _is_reference(name: str) -> bool:
    """Return whether the field is a reference. References are shown inline: ten sections would be identical."""
    return name.endswith("Ref")


def _rules(schema: Schema) -> Iterator[str]:
    if rules := schema.get(RULES):
        lines = []
        for rule in rules:
            field = rule.get("fieldPath", "").removeprefix(".")
            lines.append(f"- `{field}`: {rule['message']}" if field else f"- {rule['message']}")
        # Several rules may share a message, for example one per sink.
        yield from ("Refused:\n", *dict.fromkeys(lines), "")


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    if "x-kubernetes-int-or-string" in schema:
        return "quantity"
    match schema["type"]:
        case "array":
            return f"list of {_type(schema['items'])}"
        case "object" if "additionalProperties" in schema:
            return f"mapping to {_type(schema['additionalProperties'])}"
        case "object":
            return "mapping" if "properties" in schema else "anything"
        case other:
            return str(other)


if __name__ == "__main__":
    main()
