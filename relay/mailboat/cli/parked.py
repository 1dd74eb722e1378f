"""``mailboat parked``: list, show, retry and drop parked events."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import click

from mailboat.cli.event_filter import Selection, Table, with_selection
from mailboat.cli.options import ManifestSource, with_manifests
from mailboat.cli.output import counted, describe, json_row, key_cell, moment, shortened
from mailboat.errors import ConfigError
from mailboat.store.admin import parked_events
from mailboat.store.admin.parked_events import ParkedEvent

Result = TypeVar("Result")

_COLUMNS: Final[Table[ParkedEvent]] = {
    "ID": lambda event: str(event.ordinal),
    "SUBSCRIPTION": lambda event: event.subscription,
    "TYPE": lambda event: event.type,
    "KEY": lambda event: key_cell(event.key),
    "ATTEMPTS": lambda event: str(event.attempts),
    "NEXT ATTEMPT": lambda event: _next_attempt(event),
    "BEHIND": lambda event: str(event.behind),
    "REASON": lambda event: ("Replay: " if event.replay else "") + (event.reason or "-"),
    "ERROR": lambda event: shortened(event.last_error or "", 100),
}


@click.group()
def parked() -> None:
    """Parked events: they failed, and wait for their next attempt."""


@parked.command("list")
@with_selection
@click.option("--behind", is_flag=True, help="Show those that wait behind their key's head, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object per line.")
async def list_(source: ManifestSource, selection: Selection, behind: bool, as_json: bool) -> None:
    """List the heads of parked keys; BEHIND counts the later events of the same key."""
    query = partial(parked_events.list_parked, behind=behind, limit=selection.limit)
    events = await selection.query(source, "parked list", query)
    empty = "nothing is parked" + (" that matches" if selection.narrows else "")
    selection.print(events, _COLUMNS, json_row if as_json else None, empty=empty, order="first")


def _next_attempt(event: ParkedEvent) -> str:
    if event.blocked:
        return "blocked"
    if event.place > 1 and event.next_attempt_at is None:
        return "behind its head"
    when = moment(event.next_attempt_at)
    return f"{when} (dead-letter topic)" if event.pending_dead_letter else when


@parked.command()
@click.argument("id")
@with_manifests
async def show(source: ManifestSource, id: str) -> None:
    """Show everything about the parked event ID (its number, or the event's id): failure, headers, payload."""
    events = await Selection.of_id(id).query(source, "parked show", partial(parked_events.show_parked, limit=10))
    if not events:
        raise _no_such(id)
    click.echo("\n\n".join(map(describe, events)))


def _no_such(id: str) -> ConfigError:
    return ConfigError(f"no event {id} is parked. It may have been delivered meanwhile, or be a dead letter.")


@parked.command()
@with_selection
async def retry(source: ManifestSource, selection: Selection) -> None:
    """Retry parked events now instead of at their time.

    The head of each key is retried, and the others follow it. An event that used up its attempts (onExhausted: Block)
    gets a new count, from 0. Needs a filter, or --all.
    """
    done = await _apply("parked retry", source, selection, parked_events.retry)
    click.echo(f"{counted(sum(each.heads for each in done), 'event')} will be tried now")
    if unblocked := sum(each.unblocked for each in done):
        click.echo(f"{unblocked} of them had used up all attempts; they are counted from 0 again")


@parked.command()
@with_selection
@click.option("--yes", is_flag=True, help="Yes, give up on them.")
async def drop(source: ManifestSource, selection: Selection, yes: bool) -> None:
    """Give up on parked events: they become dead letters, and their keys continue.

    They are not sent to the dead-letter topic. `mailboat dlq replay` brings them back. Needs a filter, or --all.
    """
    dropped = sum(await _apply("parked drop", source, selection, parked_events.drop, confirmed=yes))
    click.echo(f"{counted(dropped, 'event')} given up on, kept as dead letters")


async def _apply(
    purpose: str,
    source: ManifestSource,
    selection: Selection,
    change: Callable[..., Awaitable[Result]],
    confirmed: bool = True,
) -> list[Result]:
    """Change the selected events of each outbox, heads and those behind them. Return one result per outbox."""
    selection.require_filter()
    results: list[Result] = []
    matched = 0
    for outbox in await selection.outboxes(source):
        async with outbox.link(purpose) as link:
            match = selection.match(outbox.table)
            events = await parked_events.list_parked(link, match, behind=True, limit=selection.limit)
            matched += len(events)
            if events and not confirmed:
                raise ConfigError(f"this gives up on {counted(len(events), 'parked event')}: say --yes.")
            results.append(await change(link, outbox.table, events, unordered=outbox.unordered))
    if selection.id and not matched:
        raise _no_such(selection.id)
    return results
