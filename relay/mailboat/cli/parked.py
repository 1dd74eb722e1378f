"""``mailboat parked``: list, show, retry and drop parked events."""

from __future__ import annotations

import asyncio
from dataclasses import astuple
from functools import partial
from pathlib import Path

import click

from mailboat.cli.dlq import describe
from mailboat.cli.event_filter import Selection, found_in, with_selection
from mailboat.cli.options import outboxes, with_manifests
from mailboat.cli.output import columns, counted, json_row, moment, shortened
from mailboat.errors import ConfigError
from mailboat.store.admin import parked_events
from mailboat.store.admin.parked_events import ParkedEvent

_HEADER = ("ID", "SUBSCRIPTION", "TYPE", "KEY", "ATTEMPTS", "NEXT ATTEMPT", "BEHIND", "REASON", "ERROR")


@click.group()
def parked() -> None:
    """Parked events: they failed, and wait for their next attempt."""


@parked.command("list")
@with_manifests
@with_selection
@click.option("--behind", is_flag=True, help="Show those that wait behind their key's head, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object per line.")
def list_(files: tuple[Path, ...], secrets_dir: Path | None, selection: Selection, behind: bool, as_json: bool) -> None:
    """List the heads of parked keys; BEHIND counts the later events of the same key."""
    look = partial(parked_events.list_parked, behind=behind, limit=selection.limit)
    events = asyncio.run(found_in(outboxes(files, secrets_dir), "parked list", selection, look))
    if as_json:
        for event in events:
            click.echo(json_row(event))
        return
    if not events:
        click.echo("nothing is parked" + (" that matches" if selection.narrows else ""))
        return
    for line in columns(_HEADER, (_cells(event) for event in events)):
        click.echo(line)
    if selection.limit is not None and len(events) >= selection.limit:
        click.echo(f"(the first {selection.limit}; --all shows all of them)", err=True)


def _cells(event: ParkedEvent) -> tuple[str, ...]:
    return (
        str(event.ordinal),
        event.subscription,
        event.type,
        "-" if event.key is None else shortened(event.key, 40),
        str(event.attempts),
        _next_attempt(event),
        str(event.behind),
        ("Replay: " if event.replay else "") + (event.reason or "-"),
        shortened(event.last_error or "", 100),
    )


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
def show(id: str, files: tuple[Path, ...], secrets_dir: Path | None) -> None:
    """Show everything about the parked event ID (its number, or the event's id): failure, headers, payload."""
    look = partial(parked_events.show_parked, limit=10)
    events = asyncio.run(found_in(outboxes(files, secrets_dir), "parked show", Selection.of_id(id), look))
    if not events:
        raise _no_such(id)
    click.echo("\n\n".join(describe(event, event.payload, event.content_type) for event in events))


def _no_such(id: str) -> ConfigError:
    return ConfigError(f"no event {id} is parked. It may have been delivered meanwhile, or be a dead letter.")


@parked.command()
@with_manifests
@with_selection
def retry(files: tuple[Path, ...], secrets_dir: Path | None, selection: Selection) -> None:
    """Try parked events now instead of at their time.

    Tried is the head of each key; the others follow it. An event that used up its attempts (onExhausted: Block) gets a
    new count, from 0. Needs a filter, or --all.
    """
    selection.must_be_meant()

    async def try_now() -> parked_events.Retried:
        chosen = outboxes(files, secrets_dir)
        await selection.must_exist(chosen)
        heads = unblocked = matched = 0
        for outbox in chosen:
            async with outbox.link("parked retry") as link:
                match = selection.match(outbox.table)
                events = await parked_events.list_parked(link, match, behind=True, limit=selection.limit)
                matched += len(events)
                some_heads, some_unblocked = astuple(
                    await parked_events.retry(link, outbox.table, events, unordered=outbox.unordered)
                )
            heads, unblocked = heads + some_heads, unblocked + some_unblocked
        if selection.by_id and not matched:
            raise _no_such(selection.id)
        return parked_events.Retried(heads, unblocked)

    done = asyncio.run(try_now())
    click.echo(f"{counted(done.heads, 'event')} will be tried now")
    if done.unblocked:
        click.echo(f"{done.unblocked} of them had used up all attempts; they are counted anew, from 0")


@parked.command()
@with_manifests
@with_selection
@click.option("--yes", is_flag=True, help="Yes, give up on them.")
def drop(files: tuple[Path, ...], secrets_dir: Path | None, selection: Selection, yes: bool) -> None:
    """Give up on parked events: they become dead letters, and their keys go on.

    They are not sent to the dead-letter topic. `mailboat dlq replay` brings them back. Needs a filter, or --all.
    """
    selection.must_be_meant()

    async def give_up() -> int:
        chosen = outboxes(files, secrets_dir)
        await selection.must_exist(chosen)
        dropped = matched = 0
        for outbox in chosen:
            async with outbox.link("parked drop") as link:
                match = selection.match(outbox.table)
                events = await parked_events.list_parked(link, match, behind=True, limit=selection.limit)
                matched += len(events)
                if events and not yes:
                    raise ConfigError(f"this gives up on {counted(len(events), 'parked event')}: say --yes.")
                dropped += await parked_events.drop(link, outbox.table, events, unordered=outbox.unordered)
        if selection.by_id and not matched:
            raise _no_such(selection.id)
        return dropped

    click.echo(f"{counted(asyncio.run(give_up()), 'event')} given up on, kept as dead letters")
