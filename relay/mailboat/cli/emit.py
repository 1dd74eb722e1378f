"""``mailboat emit``: one event, for trying things out."""

from typing import Any, Final

import click

import mailboat
from mailboat.cli.manifests import mismatches
from mailboat.cli.options import ManifestSource, is_called, with_manifests
from mailboat.cli.output import safe
from mailboat.errors import ConfigError, EmitRefused, SchemaMismatch
from mailboat_spec import full_name

_FLAGS: Final = {
    "type": "TYPE",
    "payload": "PAYLOAD",
    "key": "--key",
    "aggregate_type": "--aggregate-type",
    "aggregate_id": "--aggregate-id",
    "headers": "--header",
    "tags": "--tag",
    "content_type": "--content-type",
}
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
        raise EmitRefused(by_flags(str(refusal))) from refusal
    except SchemaMismatch as error:
        cause = error.__cause__
        if getattr(cause, "sqlstate", None) == _INSUFFICIENT_PRIVILEGE and (notes := getattr(cause, "__notes__", None)):
            raise SchemaMismatch(f"{str(error).partition('. ')[0]}: {notes[0]}") from error  # not the relay's grant
        raise
    click.echo(str(event_id))
    reasons = mismatches(outbox.subscriptions, type, given["aggregate_type"], given["tags"])
    if all(reasons.values()):
        summary = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "the manifests have none"
        click.echo(safe(f"note: no subscription matches the event, so it is not delivered ({summary})"), err=True)


def by_flags(refusal: str) -> str:
    """Rewrite a refusal of ``mailboat.emit`` from argument names to the options of this command."""
    argument, _, problem = refusal.removeprefix("emit: ").partition(" ")
    field, _, name = argument.partition(".")
    flag = _FLAGS.get(field)
    if flag is None:
        return refusal
    for python, option in _WORDS:
        problem = problem.replace(python, option)
    return f"{flag}{f' {name}' if name else ''}: {problem}"
