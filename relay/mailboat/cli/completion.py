"""``mailboat completion``: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


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
