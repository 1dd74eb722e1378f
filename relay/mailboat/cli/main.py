"""The entry point: the group of all commands, and the format of errors.

Exit codes: 0 done; 1 it failed; 2 wrong usage; 3 invalid input (manifest, argument, secret); 4 the database's schema
does not match; 5 the database can't be reached or refuses the login.

A command's module is imported only if the command is used: importing all of them costs seconds of CPU time.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Any, Final

import click

from mailboat.errors import (
    ConfigError,
    DatabaseUnavailable,
    EmitRefused,
    MailboatError,
    SchemaMismatch,
)
from mailboat.terminals import safe
from mailboat_spec.secrecy import forget_details, redact

_EXIT_CODES: Final[tuple[tuple[type[MailboatError], int], ...]] = (
    (ConfigError, 3),
    (EmitRefused, 3),
    (SchemaMismatch, 4),
    (DatabaseUnavailable, 5),
)


_COMMANDS: Final = {
    "run": "run",
    "consume": "consume",
    "status": "status",
    "migrate": "schema",
    "verify": "schema",
    "maintain": "schema",
    "rebase": "schema",
    "pause": "subscriptions",
    "resume": "subscriptions",
    "forget": "subscriptions",
    "dlq": "dlq",
    "parked": "parked",
    "emit": "emit",
}
"""Every command and its module, most used first."""


def exit_code(error: MailboatError) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


class Commands(click.Group):
    """Prints errors as sentences, with a traceback only for ``--debug``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(f"mailboat.cli.{_COMMANDS[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MailboatError as error:
            forget_details(error)
            message, code, details = str(error), exit_code(error), traceback.format_exc()
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
            forget_details(error)
            message = (
                f"{type(error).__name__}: {error}. This is a bug in Mailboat; --debug before the command shows where."
            )
            code, details = 1, traceback.format_exc()
        if ctx.params.get("debug"):
            click.echo(safe(redact(details), lines=True), err=True)
        click.echo(f"mailboat: {safe(redact(message), lines=True)}", err=True)
        sys.exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(package_name="mailboat")
def main(debug: bool) -> None:
    """Carry a PostgreSQL outbox to Kafka, Pub/Sub and others.

    Every command reads the manifests that say what there is: -f takes a file or a folder, and may be given again.
    """


if __name__ == "__main__":
    main()
