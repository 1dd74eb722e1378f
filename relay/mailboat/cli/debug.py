"""``debug``: what a relay does, for people who look into it."""

from __future__ import annotations

from pathlib import Path

import click

from mailboat.cli.options import manifest_option, outboxes
from mailboat.store.debug_sql import psql_script
from mailboat_spec import full_name


@click.group()
def debug() -> None:
    """Show how a relay works inside."""


@debug.command()
@manifest_option
def sql(files: tuple[Path, ...]) -> None:
    """Print the statements that a relay runs for these manifests, for psql.

    They read events and settle progress; filters and columns of the manifests are part of their text. Needs no
    database. To see a plan, write explain before a statement.
    """
    for outbox in outboxes(files, None):
        script = psql_script(outbox.layout, outbox.subscriptions)
        about = f"-- OutboxRelay {full_name(outbox.relay)}, outbox {outbox.table}"
        click.echo(f"{about}\n{script}\n" if script else f"{about}: no subscription that a relay delivers")
