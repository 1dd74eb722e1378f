"""The mistakes of docs/laptop-messages.md: a part of a manifest, the commands and their output.

Each section of the page is one mistake. Its commands must print the output of the page.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from psycopg import sql

from mailboat.cli.main import main
from mailboat_devservers.postgres import Database

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "laptop-messages.md"
LAPTOP = ROOT / "examples" / "laptop" / "orders.yaml"
_SECTION = re.compile(r"^### (.+?)\n\n(?:```yaml\n(.*?)```\n\n)?```console\n(.*?)```$", re.DOTALL | re.MULTILINE)
_WHOLE = ("sink", "database")
"""Mappings that a part of a manifest replaces completely."""
_DATABASE = "postgresql://…"
_OTHER_USER = re.compile(r"postgresql://(\w+)@…")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Mistake:
    """One section of the page."""

    title: str
    manifest: str
    """Part of a manifest, merged into the smallest one; a whole file if it begins with apiVersion; otherwise empty."""
    commands: tuple[str, ...]
    shown: str = ""
    no_manifest: bool = False

    @property
    def needs_database(self) -> bool:
        return any("…" in command for command in self.commands)


def mistakes() -> list[Mistake]:
    """Return the sections of the page."""
    found = []
    for title, manifest, shown in _SECTION.findall(PAGE.read_text(encoding="utf-8")):
        commands = tuple(line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ "))
        found.append(Mistake(title, manifest, commands, shown, no_manifest=title == "No manifest"))
    return found


def run_mistake(mistake: Mistake, folder: Path, database: Database | None) -> str:
    """Run the commands in a folder with the manifest, and return commands and output in the format of the page."""
    if not mistake.no_manifest:
        (folder / "mailboat.yaml").write_text(_manifest(mistake.manifest), encoding="utf-8")
    environment: dict[str, str | None] = {"MAILBOAT_MANIFESTS": None, "MAILBOAT_SECRETS_DIR": None}
    text = ""
    for command in mistake.commands:
        text += f"$ {command}\n"
        first, *arguments = shlex.split(_concrete(command, database))
        if first == "export":
            name, _, value = arguments[0].partition("=")
            environment[name] = value
            continue
        assert first == "mailboat", command
        result = CliRunner(env=environment).invoke(main, arguments, prog_name="mailboat", terminal_width=100)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        text += "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())
    return _UUID.sub("1663410f-853a-4bbc-98c9-dba7da5bb6ea", text)


def _concrete(command: str, database: Database | None) -> str:
    """Replace each ellipsis of the page by the URL of the test's database. Create other users that the URL names."""
    if database is None:
        return command
    for user in _OTHER_USER.findall(command):
        own = f"{user}_{database.name}"  # roles belong to the whole server
        database.execute(sql.SQL("create role {} login").format(sql.Identifier(own)))
        command = command.replace(f"postgresql://{user}@…", database.url_for(own))
    return command.replace(_DATABASE, database.url)


def _manifest(part: str) -> str:
    smallest = LAPTOP.read_text(encoding="utf-8")
    if part.startswith("apiVersion"):
        return part
    documents = list(yaml.safe_load_all(smallest))
    if part:
        change = yaml.safe_load(part)
        documents = [_merged(each, change) if each["kind"] == change["kind"] else each for each in documents]
    return yaml.safe_dump_all(documents, sort_keys=False)


def _merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in change.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict) and name not in _WHOLE
        result[name] = _merged(result[name], value) if both else value
    return result
