"""The entry point: the group of all commands, and the format of errors.

Exit codes: 0 done; 1 it failed; 2 wrong usage; 3 invalid input (manifest, argument, secret); 4 the database's schema
does not match; 5 the database can't be reached or refuses the login.

A command's module is imported only if the command is used: importing all of them costs seconds of CPU time.
"""

import sys
import traceback
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from mailboat.cli.output import safe
from mailboat.errors import ConfigError, DatabaseUnavailable, EmitRefused, MailboatError, SchemaMismatch
from mailboat_spec.redaction import forget_details, redact

_EXIT_CODES: Final = {ConfigError: 3, EmitRefused: 3, SchemaMismatch: 4, DatabaseUnavailable: 5}
_COMMANDS: Final = {
    "init": "manifests",
    "check": "manifests",
    "run": "run",
    "consume": "application",
    "status": "status",
    "migrate": "database",
    "verify": "database",
    "maintain": "database",
    "rebase": "database",
    "pause": "database",
    "resume": "database",
    "forget": "database",
    "dlq": "failed_events",
    "parked": "failed_events",
    "emit": "application",
    "match": "manifests",
    "schema": "manifests",
    "debug": "manifests",
    "completion": "main",
}
"""Every command and its module, in the order of the help."""

_SUBCOMMANDS: Final = ("dlq list", "dlq show", "dlq replay", "dlq purge", "parked retry", "parked drop", "debug sql")
"""Commands of groups, for the hint of an unknown command."""


def exit_code(error: Exception) -> int:
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)


class Commands(click.Group):
    """Prints errors as sentences, with a traceback only for ``--debug``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        return None if module is None else getattr(import_module(f"mailboat.cli.{module}"), cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            meant = get_close_matches(name, _COMMANDS, 1) or [each for each in _SUBCOMMANDS if name in each.split()]
            hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
            forget_details(error)
            if ctx.params.get("debug"):
                click.echo(safe(redact(traceback.format_exc()), lines=True), err=True)
            message = str(error)
            if not isinstance(error, MailboatError):
                bug = "This is a bug in Mailboat; --debug before the command shows where."
                message = f"{type(error).__name__}: {error}. {bug}"
            click.echo(f"mailboat: {safe(redact(message), lines=True)}", err=True)
            sys.exit(exit_code(error))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(package_name="mailboat")
def main(debug: bool) -> None:
    """Deliver the events of a PostgreSQL outbox to Kafka, Pub/Sub and others.

    Every command reads manifests: -f takes a file, a folder or - (standard input), and may be given again. Without -f:
    $MAILBOAT_MANIFESTS, then mailboat.yaml in this folder.

    \b
    Begin with:
      mailboat init               write mailboat.yaml
      mailboat migrate            create the outbox in its database
      mailboat run                deliver events
      mailboat status --wait      until everything is delivered
    """


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete commands and options of mailboat.

    \b
    Examples:
      eval "$(mailboat completion bash)"                       # this shell; in ~/.bashrc: all
      mailboat completion zsh > "${fpath[1]}/_mailboat"
      mailboat completion fish > ~/.config/fish/completions/mailboat.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(context.find_root().command, {}, "mailboat", "_MAILBOAT_COMPLETE")
    click.echo(script.source_template % script.source_vars())  # source() would start bash only to check its version


if __name__ == "__main__":
    main()
