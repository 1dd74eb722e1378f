"""``mailboat emit`` and ``mailboat consume``: the application's side, from the command line."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

import mailboat
from mailboat.cli.manifests import mismatch
from mailboat.cli.options import ManifestSource, is_called, with_logging, with_manifests
from mailboat.cli.output import safe
from mailboat.errors import ConfigError, EmitRefused, SchemaMismatch
from mailboat_spec import full_name

_INSUFFICIENT_PRIVILEGE: Final = "42501"
_WORDS: Final = (
    ("content_type='text/plain'", "--content-type text/plain"),
    ("leave it out to keep the order of aggregate_id, or say ordered=False", "leave it out"),
    ("contain the name", "can't have the name"),
)


@click.command(short_help="Write one event, for trying things out.")
@click.argument("type")
@click.argument("payload", required=False)
@with_manifests
@click.option("--relay", help="Which OutboxRelay's outbox, where the manifests have several.")
@click.option("--key", help="What order is kept by.")
@click.option("--aggregate-type", help="Kind of thing the event is about.")
@click.option("--aggregate-id", help="Which one; also the key, where none is given.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header. May be given again.")
@click.option("--tag", "tags", multiple=True, help="Tag, for filters. May be given again.")
@click.option("--content-type", help="Media type of the payload. [default: application/json]")
async def emit(
    source: ManifestSource, type: str, payload: str | None, relay: str | None, headers: tuple[str, ...], **given: Any
) -> None:
    """Write one event of TYPE with PAYLOAD (JSON unless --content-type says otherwise; none: a tombstone).

    \b
    Examples:
      mailboat emit order.placed '{"order": "o-1"}' --key o-1
      mailboat emit order.placed '{"order": "o-1"}' --aggregate-type order --aggregate-id o-1 --tag eu
      mailboat emit note.added 'plain text' --content-type text/plain
    """
    available = source.outboxes()
    chosen = [each for each in available if relay is None or is_called(full_name(each.relay), relay)]
    if len(chosen) != 1:
        problem = "say which outbox with --relay" if chosen else f"there is no OutboxRelay {relay}"
        raise ConfigError(f"{problem}; the manifests have: {', '.join(full_name(each.relay) for each in available)}.")
    (outbox,) = chosen
    for header in headers:
        if "=" not in header:
            raise click.BadParameter(f"{header!r} is not NAME=VALUE", param_hint="--header")
    given["headers"] = dict(header.split("=", 1) for header in headers)
    try:
        async with outbox.link("emit") as link, link.transaction():
            event_id = await mailboat.emit(link.connection, type, payload, outbox=outbox.table, **given)
    except EmitRefused as refusal:
        raise EmitRefused(_by_flags(str(refusal))) from refusal
    except SchemaMismatch as error:
        cause = error.__cause__
        if getattr(cause, "sqlstate", None) == _INSUFFICIENT_PRIVILEGE and (notes := getattr(cause, "__notes__", None)):
            raise SchemaMismatch(f"{str(error).partition('. ')[0]}: {notes[0]}") from error  # not the relay's grant
        raise
    click.echo(str(event_id))
    reasons = {
        full_name(each): mismatch(each, type, given["aggregate_type"], given["tags"]) for each in outbox.subscriptions
    }
    if all(reasons.values()):
        summary = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "the manifests have none"
        click.echo(safe(f"note: no subscription matches the event, so it is not delivered ({summary})"), err=True)


def _by_flags(refusal: str) -> str:
    """Rewrite a refusal of ``mailboat.emit`` from argument names to the options of this command."""
    argument, _, problem = refusal.removeprefix("emit: ").partition(" ")
    field, _, name = argument.partition(".")
    given = next((each for each in emit.params if each.name == field), None)
    if given is None:
        return refusal
    for python, option in _WORDS:
        problem = problem.replace(python, option)
    flag = given.opts[0] if isinstance(given, click.Option) else given.human_readable_name
    return f"{flag}{f' {name}' if name else ''}: {problem}"


@click.command(short_help="Run the handlers of a consumer.")
@with_manifests
@click.argument("target", metavar="MODULE:CONSUMER")
@click.option("--listen", metavar="ADDRESS", help="Address of /livez, /readyz, /status and /metrics, like :8080.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    help="Outbox: transactions at the same time. Source: events at the same time.",
)
@with_logging
def consume(source: ManifestSource, target: str, listen: str | None, concurrency: int | None) -> None:
    """Run the handlers of a subscription until SIGTERM or SIGINT: one with sink pull, or one with a source.

    MODULE:CONSUMER names a mailboat.Consumer, as in shop.billing:consumer; the module is looked for in the current
    folder first. At the first signal, running handlers finish and their transactions commit.
    """
    from mailboat.consumer import Consumer  # large, and the list of commands imports this module

    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{target} names no consumer: write module:consumer, as in shop.billing:consumer.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # a missing dependency of the application
        raise ConfigError(f"{target}: there is no module {module} here: start it in the folder that has it.") from error
    if not isinstance(found, Consumer):
        raise ConfigError(f"{target}: {module} has no mailboat.Consumer called {name}.")
    found.configure(manifests=source.files, secrets_dir=source.secrets_dir, listen=listen, concurrency=concurrency)
    found.run()
