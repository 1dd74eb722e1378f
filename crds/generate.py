"""Generate the CRDs and the reference of both resources from the models: ``make crds``.

A development tool, outside the package: the package itself does not depend on YAML. A test compares the committed files
with the output of ``files``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from mailboat_spec.crds import definitions
from mailboat_spec.crds.reference import reference

ROOT: Final = Path(__file__).parent.parent
_CHART: Final = ROOT / "charts" / "mailboat" / "files" / "crds"
"""Copies for Helm, which can't read files outside a chart."""
_HEADER: Final = "# Made from the models in crds/mailboat_spec by `make crds`: change those, not this file.\n"


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
            written[folder / definition.file_name] = _HEADER + body
    written[ROOT / "docs" / "resources.md"] = reference(definitions())
    return written


def main() -> None:
    """Write the files that differ and print their paths."""
    for path, text in files().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
