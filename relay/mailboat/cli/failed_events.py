"""``mailboat dlq`` and ``mailboat parked``: events that failed, for good or until their next attempt."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import click

from mailboat.cli.event_filter import Selection, Table, no_such_dead_letter, with_selection
from mailboat.cli.options import ManifestSource, duration_option, is_called, with_manifests
from mailboat.cli.output import counted, describe, json_line, json_row, key_cell, moment, named, shortened
from mailboat.cli.topic_dead_letters import TopicDeadLetters
from mailboat.errors import ConfigError
from mailboat.runtime.manifest_files import load
from mailboat.store.admin import dead_letters, parked_events
from mailboat.store.admin.dead_letters import Candidate, DeadLetter
from mailboat.store.admin.parked_events import ParkedEvent
from mailboat_spec import full_name

Result = TypeVar("Result")

_DEAD_LETTER_COLUMNS: Final[Table[DeadLetter]] = {
    "ID": lambda letter: str(letter.dead_id),
    "SUBSCRIPTION": lambda letter: letter.subscription,
    "TYPE": lambda letter: letter.type,
    "KEY": lambda letter: key_cell(letter.key),
    "ATTEMPTS": lambda letter: str(letter.attempts),
    "DIED": lambda letter: moment(letter.died_at),
    "REPLAYED": lambda letter: moment(letter.replayed_at),
    "REASON": lambda letter: letter.reason,
    "ERROR": lambda letter: shortened(letter.last_error, 100),
}
_PARKED_COLUMNS: Final[Table[ParkedEvent]] = {
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
def dlq() -> None:
    """Dead letters: events that were given up on."""


def _consumer_topic(source: ManifestSource, selection: Selection) -> TopicDeadLetters | None:
    """Return the topic of the selected subscription; None if its dead letters are in a database."""
    manifests = load(source.files, needs_relay=False)
    consumers = [each for each in manifests.subscriptions if each.spec.source is not None]
    name = selection.filter.subscription
    if name is not None:
        consumers = [each for each in consumers if is_called(full_name(each), name)]
    if not consumers or (name is None and manifests.relays):  # without a relay, the only consumer is meant
        return None
    if len(consumers) > 1:
        raise click.UsageError(f"say --subscription: one of {', '.join(map(full_name, consumers))}")
    return TopicDeadLetters(consumers[0], source.secrets)


@dlq.command("list")
@with_selection
@click.option("--replayed", is_flag=True, help="Show those that were replayed, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object per line.")
async def list_dead_letters(source: ManifestSource, selection: Selection, replayed: bool, as_json: bool) -> None:
    """List dead letters, the newest last.

    Those of a consumer behind a broker are on its dead-letter topic: say --subscription.
    """
    if (topic := _consumer_topic(source, selection)) is not None:
        return await topic.list_letters(selection, replayed=replayed, as_json=as_json)
    query = partial(dead_letters.list_dead, replayed=replayed, limit=selection.limit)
    letters = await selection.query(source, "dlq list", query)
    empty = "no dead letters" + (" match" if selection.narrows else "")
    selection.print(letters, _DEAD_LETTER_COLUMNS, json_row if as_json else None, empty=empty, order="newest")


@dlq.command("show")
@click.argument("id")
@with_manifests
@click.option("--subscription", metavar="NAME", help="Of this subscription (namespace/name, or the name alone).")
@click.option("--json", "as_json", is_flag=True, help="For programs: the dead letter as one JSON document per line.")
async def show_dead_letter(source: ManifestSource, id: str, subscription: str | None, as_json: bool) -> None:
    """Show everything about the dead letter ID (as in the list, or the event's id): failure, headers, payload."""
    selection = Selection.of_id(id, subscription)
    if (topic := _consumer_topic(source, selection)) is not None:
        return await topic.show_letters(selection, as_json=as_json)
    letters = await selection.query(source, "dlq show", partial(dead_letters.show_dead, limit=10))
    if not letters:
        raise no_such_dead_letter(id)
    documents = [json_line(letter.pop("document")) for letter in letters]
    click.echo("\n".join(documents) if as_json else "\n\n".join(map(describe, letters)))


@dlq.command()
@with_selection
@click.option("--dry-run", is_flag=True, help="Say what would be replayed, and change nothing.")
@click.option("--rate", type=click.FloatRange(min=0.01), metavar="N", help="At most N events per second.")
@click.option("--again", is_flag=True, help="Those that were replayed before, too.")
async def replay(source: ManifestSource, selection: Selection, dry_run: bool, rate: float | None, again: bool) -> None:
    """Send dead letters once more.

    They go to the head of their key's queue, in their own order, with a new count of attempts, marked as a replay; the
    relay that owns the partition sends them. What was sent before stays before. One that fails again becomes a new dead
    letter. Needs a filter, or --all.

    Those of a consumer behind a broker (--subscription) are published to the topic that they came from, for that
    consumer only. Interrupted, the same command continues; --again begins at the oldest one.
    """
    selection.require_filter()
    if (topic := _consumer_topic(source, selection)) is not None:
        return await topic.replay_letters(selection, dry_run=dry_run, rate=rate, again=again)
    replayed = matched = 0
    for outbox in await selection.outboxes(source):
        async with outbox.link("dlq replay") as link:
            found = await dead_letters.candidates(
                link, selection.match(outbox.table), replayed=again or bool(selection.id), limit=selection.limit
            )
            matched += len(found)
            if not again:
                _refuse_replayed(found)
            plan = dead_letters.plan(found)
            _refuse_orphaned(plan)
            for each in plan.waiting:
                click.echo(f"{each.dead_id} {_named(each)}: waits to be sent already")
            if dry_run:
                for each in plan.replay:
                    click.echo(f"{each.dead_id} {_named(each)}: would be replayed")
                replayed += len(plan.replay)
                continue
            send = partial(dead_letters.replay, link, outbox.table, again=again, unordered=outbox.unordered)
            for batch, pause in paced(plan.replay, rate):
                await asyncio.sleep(pause)
                replayed += await send(batch)
    if selection.id and not matched:
        raise no_such_dead_letter(selection.id)
    click.echo(f"{counted(replayed, 'dead letter')} {'would be replayed' if dry_run else 'replayed'}")


def _refuse_orphaned(plan: dead_letters.ReplayPlan) -> None:
    """Report orphaned dead letters. Raise ``ConfigError`` only if there are no others to replay."""
    messages = [
        f"{each.dead_id} {_named(each)}: its subscription was deleted, and no relay would send it. It stays: create a"
        f" subscription {each.subscription} again, and replay it then."
        for each in plan.orphaned
    ]
    if messages and not (plan.replay or plan.waiting):
        raise ConfigError("\n".join(messages))
    for message in messages:
        click.echo(message)


def _refuse_replayed(found: Sequence[Candidate]) -> None:
    """Raise ``ConfigError`` for a replayed dead letter. Only a selection by id can match one."""
    for each in found:
        if each.replayed_at is not None and not each.waits:
            raise ConfigError(
                f"dead letter {each.dead_id} was replayed at {moment(each.replayed_at)} already; say --again to replay"
                " it once more."
            )


def _named(each: Candidate) -> str:
    return f"{each.subscription} {named(each.type, each.key)}"


def paced(chosen: Sequence[Candidate], rate: float | None) -> list[tuple[Sequence[Candidate], float]]:
    """Return batches, each with the delay in seconds before it."""
    size = max(1, len(chosen) if rate is None else int(rate))
    starts = range(0, len(chosen), size)
    return [(chosen[start : start + size], size / rate if rate and start else 0.0) for start in starts]


@dlq.command()
@with_selection
@duration_option("--older-than", default="720h", help="Replayed longer ago than this.")
@click.option("--yes", is_flag=True, help="Yes, delete them.")
async def purge(source: ManifestSource, selection: Selection, older_than: float, yes: bool) -> None:
    """Delete dead letters that were replayed, the oldest first. Those that were not are never deleted.

    Needs a filter, or --all; --limit then says how many of them at most.
    """
    selection.require_filter()
    if (topic := _consumer_topic(source, selection)) is not None:
        raise ConfigError(f"the dead letters of {topic.name} are on topic {topic.topic}: its retention deletes them.")
    if not yes:
        raise ConfigError("this deletes dead letters for good: say --yes.")
    if selection.id and not await selection.query(source, "dlq purge", partial(dead_letters.show_dead, limit=1)):
        raise no_such_dead_letter(selection.id)
    deleted = 0
    for outbox in await selection.outboxes(source):
        left = None if selection.limit is None else selection.limit - deleted
        async with outbox.link("dlq purge") as link:
            deleted += await dead_letters.purge(link, selection.match(outbox.table), older_than=older_than, limit=left)
    click.echo(f"{counted(deleted, 'dead letter')} deleted")


@click.group()
def parked() -> None:
    """Parked events: they failed, and wait for their next attempt."""


@parked.command("list")
@with_selection
@click.option("--behind", is_flag=True, help="Show those that wait behind their key's head, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object per line.")
async def list_parked(source: ManifestSource, selection: Selection, behind: bool, as_json: bool) -> None:
    """List the heads of parked keys; BEHIND counts the later events of the same key."""
    query = partial(parked_events.list_parked, behind=behind, limit=selection.limit)
    events = await selection.query(source, "parked list", query)
    empty = "nothing is parked" + (" that matches" if selection.narrows else "")
    selection.print(events, _PARKED_COLUMNS, json_row if as_json else None, empty=empty, order="first")


def _next_attempt(event: ParkedEvent) -> str:
    if event.blocked:
        return "blocked"
    if event.place > 1 and event.next_attempt_at is None:
        return "behind its head"
    when = moment(event.next_attempt_at)
    return f"{when} (dead-letter topic)" if event.pending_dead_letter else when


@parked.command("show")
@click.argument("id")
@with_manifests
async def show_parked(source: ManifestSource, id: str) -> None:
    """Show everything about the parked event ID (its number, or the event's id): failure, headers, payload."""
    events = await Selection.of_id(id).query(source, "parked show", partial(parked_events.show_parked, limit=10))
    if not events:
        raise _not_parked(id)
    click.echo("\n\n".join(map(describe, events)))


def _not_parked(id: str) -> ConfigError:
    return ConfigError(f"no event {id} is parked. It may have been delivered meanwhile, or be a dead letter.")


@parked.command()
@with_selection
async def retry(source: ManifestSource, selection: Selection) -> None:
    """Retry parked events now instead of at their time.

    The head of each key is retried, and the others follow it. An event that used up its attempts (onExhausted: Block)
    gets a new count, from 0. Needs a filter, or --all.
    """
    done = await _apply("parked retry", source, selection, parked_events.retry, yes=True)
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
    dropped = sum(await _apply("parked drop", source, selection, parked_events.drop, yes))
    click.echo(f"{counted(dropped, 'event')} given up on, kept as dead letters")


async def _apply(
    purpose: str, source: ManifestSource, selection: Selection, change: Callable[..., Awaitable[Result]], yes: bool
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
            if events and not yes:
                raise ConfigError(f"this gives up on {counted(len(events), 'parked event')}: say --yes.")
            results.append(await change(link, outbox.table, events, unordered=outbox.unordered))
    if selection.id and not matched:
        raise _not_parked(selection.id)
    return results
