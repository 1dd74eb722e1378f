"""The entry point: the group of all commands, and what an error looks like to a person.

Exit codes: 0 done; 1 it failed; 2 wrong usage; 3 something a person wrote is wrong (manifest, argument, secret); 4 the
database's schema is not what it must be; 5 the database is away; 6 the database is a restored copy; 7 another process
runs under this relay's name.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any, Final

import click

from mailboat.cli.dlq import dlq
from mailboat.cli.emit import emit
from mailboat.cli.parked import parked
from mailboat.cli.printing import safe
from mailboat.cli.run import run
from mailboat.cli.schema import maintain, migrate, rebase, verify
from mailboat.cli.status import status
from mailboat.cli.subscriptions import forget, pause, resume
from mailboat.errors import (
    ConfigError,
    DatabaseUnavailable,
    EmitRefused,
    ForeignDatabase,
    LeaseLost,
    MailboatError,
    SchemaMismatch,
)
from mailboat.logs import redact

_EXIT_CODES: Final[tuple[tuple[type[MailboatError], int], ...]] = (
    (ConfigError, 3),
    (EmitRefused, 3),
    (SchemaMismatch, 4),
    (DatabaseUnavailable, 5),
    (ForeignDatabase, 6),
    (LeaseLost, 7),
)


def exit_code(error: MailboatError) -> int:
    """What a script can tell an error by."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


class Commands(click.Group):
    """Prints errors as sentences. A traceback is for those who ask for one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as they were added: what is used most comes first

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MailboatError as error:
            message, code, details = str(error), exit_code(error), traceback.format_exc()
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
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


for command in (run, status, migrate, verify, maintain, rebase, pause, resume, forget, dlq, parked, emit):
    main.add_command(command)


if __name__ == "__main__":
    main()
