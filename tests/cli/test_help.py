"""Help texts, a newcomer's first view of the command line. A change of the output must be intended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click import Command, Context, Group
from click.testing import CliRunner

from mailboat.cli.main import main

HELP = """\
Usage: mailboat [OPTIONS] COMMAND [ARGS]...

  Deliver the events of a PostgreSQL outbox to Kafka, Pub/Sub and others.

  Every command reads manifests: -f takes a file, a folder or - (standard
  input), and may be given again. Without -f: $MAILBOAT_MANIFESTS, then
  mailboat.yaml in this folder.

  Begin with:
    mailboat init               write mailboat.yaml
    mailboat migrate            create the outbox in its database
    mailboat run                deliver events
    mailboat status --wait      until everything is delivered

Options:
  --debug     Show tracebacks of errors.
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Commands:
  init        Write a first manifest to this folder.
  check       Check manifests; needs no database and no Secret.
  run         Deliver events until SIGTERM or SIGINT.
  consume     Run the handlers of a consumer.
  status      Show subscriptions at a glance, once or live.
  migrate     Create or upgrade the outbox and Mailboat's tables.
  verify      Check the schema; print the SQL that is missing.
  maintain    Create time partitions ahead and drop expired ones, once.
  rebase      Continue in a copy of the database, or after pg_upgrade.
  pause       Stop delivering to subscription NAME; nothing is lost.
  resume      Go on delivering to subscription NAME, where it stopped.
  forget      Delete a subscription's progress and events.
  dlq         Dead letters: events that were given up on.
  parked      Parked events: they failed, and wait for their next attempt.
  emit        Write one event, for trying things out.
  match       Show which subscriptions take an event.
  schema      Print the JSON Schema of manifests, for editors.
  debug       Show how a relay works inside.
  completion  Print the completion script of a shell.
"""


def test_the_first_page():
    result = CliRunner().invoke(main, ["--help"], prog_name="mailboat", terminal_width=80)
    assert result.stdout == HELP


def commands(group: Group, *above: str) -> list[tuple[tuple[str, ...], Command]]:
    found: list[tuple[tuple[str, ...], Command]] = []
    context = Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += commands(command, *above, name) if isinstance(command, Group) else [((*above, name), command)]
    return found


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(path, command, id=" ".join(path)) for path, command in commands(main)]
)
def test_every_command_explains_itself_and_its_options(path: tuple[str, ...], command: Command):
    result = CliRunner().invoke(main, [*path, "--help"], prog_name="mailboat")
    assert result.exit_code == 0
    assert command.help
    unexplained = [
        option.name
        for option in command.params
        if option.param_type_name == "option" and not getattr(option, "help", None)
    ]
    assert unexplained == []


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(path, command, id=" ".join(path)) for path, command in commands(main)]
)
def test_paths_are_not_checked_by_click(path: tuple[str, ...], command: Command):
    """If click checked a path first, the message and the exit code would be click's."""
    paths = [option.type for option in command.params if isinstance(option.type, click.Path)]
    assert not any(each.exists or each.readable for each in paths)


def test_a_command_imports_only_its_own_modules():
    script = "import sys, mailboat.cli.main as m; m.main(['emit', '--help'], standalone_mode=False);"
    script += "print([name for name in ('aiohttp', 'jwt', 'prometheus_client') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("typed", "meant"), [("stauts", "status"), ("replay", "dlq replay"), ("retry", "parked retry"), ("frobnicate", "")]
)
def test_a_misspelt_command_is_answered_with_the_nearest(typed: str, meant: str):
    result = CliRunner().invoke(main, [typed], prog_name="mailboat")
    assert result.exit_code == 2
    assert (f"Did you mean {meant}?" in result.stderr) is bool(meant)


def test_the_documentation_names_every_command():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for path, _ in commands(main):
        assert f"`mailboat {path[0]}" in page
        assert path[-1] in page


def test_without_the_extras_of_a_relay_the_error_names_the_package():
    script = "import sys; sys.modules['click'] = None; from mailboat.cli import start; start()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "mailboat: the command line needs click, which is not installed: install mailboat[relay]\n"
    assert done.returncode == 1
