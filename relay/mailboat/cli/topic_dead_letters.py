"""``mailboat dlq`` for consumers behind a broker: their dead letters are on a topic, not in a database."""

import json
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import click

from mailboat.cli.event_filter import Selection, Table, no_such_dead_letter
from mailboat.cli.output import counted, describe, json_line, key_cell, moment, named, safe, shortened
from mailboat.consumer.broker.dead_letter_access import DeadLetterAccess, message_of
from mailboat.consumer.broker.replay import Letter, LetterFilter, Replay
from mailboat.errors import ConfigError, DeliveryError

_COLUMNS: Final[Table[Letter]] = {
    "ID": lambda letter: letter.place,
    "TYPE": lambda letter: letter.event.type,
    "KEY": lambda letter: key_cell(letter.event.key),
    "ATTEMPTS": lambda letter: str(letter.content.attempts),
    "DIED": lambda letter: moment(letter.content.failed_at),
    "REPLAYS": lambda letter: str(letter.replays),
    "REASON": lambda letter: letter.content.reason,
    "ERROR": lambda letter: shortened((letter.content.error.strip().splitlines() or [""])[-1], 100),
}
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class TopicDeadLetters(DeadLetterAccess):
    async def list_letters(self, selection: Selection, *, replayed: bool, as_json: bool) -> None:
        """Print dead letters after the progress of replays; with ``replayed``, all that the topic still has."""
        filter_ = _filter(selection)
        found = deque(await self.matching(filter_, everything=replayed), maxlen=selection.limit)
        chosen = sorted(found, key=lambda letter: letter.content.failed_at or _EPOCH)
        empty = "no dead letters" + (" match" if filter_.narrows else "")
        selection.print(chosen, _COLUMNS, _json if as_json else None, empty=empty, order="newest")

    async def show_letters(self, selection: Selection, *, as_json: bool) -> None:
        """Print everything about the selected dead letters; with ``as_json`` the document that was stored."""
        found = await self.matching(_filter(selection), everything=True)
        if not found:
            raise no_such_dead_letter(selection.id)
        click.echo("\n".join(map(_document, found)) if as_json else "\n\n".join(map(_described, found)))

    async def replay_letters(self, selection: Selection, *, dry_run: bool, rate: float | None, again: bool) -> None:
        filter_ = _filter(selection)
        async with self.opened(filter_, everything=again or bool(selection.id)) as (letters, sink):
            if not dry_run:
                await sink.open()
            replay = Replay(
                letters, sink, self.name, filter_, rate=rate, limit=selection.limit, dry_run=dry_run, again=again
            )
            try:
                async for letter in replay.run():
                    if dry_run:
                        click.echo(f"{_named(letter)}: would be replayed")
            except DeliveryError as error:
                raise ConfigError(
                    f"{counted(replay.progress.replayed, 'dead letter')} replayed, then one was not accepted:"
                    f" {message_of(error)}\nRun the same command again to continue."
                ) from error
        for letter in replay.progress.loops:
            click.echo(f"{_named(letter)}: was replayed {letter.replays} times; say --again to replay it")
        for letter in replay.progress.without_value:
            click.echo(f"{_named(letter)}: not replayed, too large and gone from {_origin(letter)}")
        if selection.id and not replay.progress.replayed and not replay.progress.loops:
            raise no_such_dead_letter(selection.id)
        done = "would be replayed" if dry_run else "replayed"
        click.echo(f"{counted(replay.progress.replayed, 'dead letter')} {done}")


def _filter(selection: Selection) -> LetterFilter:
    filter_ = selection.filter
    place = selection.place if filter_.number is None else str(filter_.number)
    return LetterFilter(replace(filter_, subscription=None, number=None), place)


def _fields(letter: Letter) -> dict[str, Any]:
    content, event = letter.content, letter.event
    return {
        "id": letter.place,
        "subscription": content.consumer,
        "event_id": str(event.id),
        "type": event.type,
        "key": event.key,
        "attempts": content.attempts,
        "died_at": moment(content.failed_at),
        "replays": letter.replays,
        "reason": content.reason,
        "error": content.error,
        "origin": _origin(letter),
        "truncated": content.truncated,
        "content_type": event.content_type,
        "created_at": moment(event.created_at),
        "headers": dict(event.headers),
    }


def _json(letter: Letter) -> str:
    return json.dumps(_fields(letter), ensure_ascii=False)


def _document(letter: Letter) -> str:
    """Return the stored document. A dead letter that was too large for one has only its fields."""
    if letter.content.truncated is None and letter.message.value is not None:
        return json_line(letter.message.value.decode(errors="replace"))
    return json.dumps(_fields(letter), default=str)


def _described(letter: Letter) -> str:
    fields = {name: value for name, value in _fields(letter).items() if name != "error"}
    return describe({**fields, "payload": letter.event.payload}, ("error", safe(letter.content.error, lines=True)))


def _origin(letter: Letter) -> str:
    original = letter.content.original
    if original.partition is None:
        return f"{original.topic}, message {original.offset}"
    return f"topic {original.topic}, partition {original.partition}, offset {original.offset}"


def _named(letter: Letter) -> str:
    return f"{letter.place} {named(letter.event.type, letter.event.key)}"
