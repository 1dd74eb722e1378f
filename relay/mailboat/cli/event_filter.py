"""Selection of dead letters or parked events: the options, and their translation to a database filter."""

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, Self, TypeVar

import click

from mailboat.cli.options import Command, ManifestSource, Outbox, find_subscriptions, is_called, parser, with_manifests
from mailboat.cli.output import columns
from mailboat.errors import ConfigError
from mailboat.store.admin.selection import Match
from mailboat.store.connection import PostgresConnection
from mailboat_spec import Duration, Pattern, full_name

Found = TypeVar("Found")
Query = Callable[[PostgresConnection, Match], Awaitable[list[Found]]]
Cell = Callable[[Found], str]
Table = Mapping[str, Cell[Found]]
"""Column -> text of its cell."""

_DEFAULT_LIMIT = 100
_ANY = Match(outbox="")
_FILTER_OPTIONS = ("subscription", "key", "type", "since", "until", "error")
_LIKE = parser(lambda text: Pattern(text).like())
_SINCE = "Not before this time, or so long ago: 2026-01-31T12:00:00Z, 2h."


@dataclass(frozen=True, slots=True)
class Selection:
    filter: Match = _ANY
    """Filter without an outbox; ``match`` sets it."""
    limit: int | None = None
    all: bool = False
    id: str = ""
    """Number, event id or place of the one event that is selected; else empty."""
    place: str | None = None
    """Partition and offset on a dead-letter topic, as PARTITION:OFFSET."""

    @classmethod
    def of_id(cls, text: str, subscription: str | None = None) -> Self:
        if text.isascii() and text.isdigit() and len(text) < 19:
            return cls(Match("", subscription, number=int(text)), id=str(int(text)))
        if re.fullmatch(r"[0-9]{1,10}:[0-9]{1,19}", text):
            return cls(Match("", subscription), id=text, place=text)
        try:
            event_id = str(uuid.UUID(text))
        except ValueError:
            problem = f"{text!r} is neither a number nor an event's id (a UUID)"
            raise click.BadParameter(problem, param_hint="ID") from None
        return cls(Match("", subscription, event_id=event_id), id=event_id)

    @property
    def narrows(self) -> bool:
        return self.filter.narrows or self.place is not None

    def match(self, outbox: str) -> Match:
        if self.place is not None:
            raise click.UsageError(f"{self.place} is on a consumer's dead-letter topic: say --subscription NAME")
        return replace(self.filter, outbox=outbox)

    def require_filter(self) -> None:
        if not self.narrows and not self.all:
            raise click.UsageError("say which ones (--id, --key, --type, --error, ...), or --all")

    async def outboxes(self, source: ManifestSource) -> list[Outbox]:
        """Return the outboxes to search. Raise ``ConfigError`` for an unknown subscription: it would match nothing."""
        chosen, name = source.outboxes(), self.filter.subscription
        declared = (full_name(each) for outbox in chosen for each in outbox.subscriptions)
        if name is not None and not any(is_called(each, name) for each in declared):
            await find_subscriptions(chosen, name)  # a relay has declared it, whose manifests are not here
        return chosen

    async def query(self, source: ManifestSource, purpose: str, query: Query[Found]) -> list[Found]:
        found: list[Found] = []
        for outbox in await self.outboxes(source):
            async with outbox.link(purpose) as link:
                found += await query(link, self.match(outbox.table))
        return found

    def print(
        self, found: Sequence[Found], table: Table[Found], to_json: Cell[Found] | None, *, empty: str, order: str
    ) -> None:
        """Print rows as a table, or as JSON with ``to_json``. ``order`` says which rows the limit keeps: the newest."""
        if to_json is not None:
            for each in found:
                click.echo(to_json(each))
            return
        lines = columns(tuple(table), ([cell(each) for cell in table.values()] for each in found))
        click.echo("\n".join(lines) if found else empty)
        if self.limit is not None and len(found) >= self.limit:
            click.echo(f"(the {order} {self.limit}; --all shows all of them)", err=True)


def no_such_dead_letter(id: str) -> ConfigError:
    return ConfigError(f"there is no dead letter {id}. `mailboat dlq list --replayed` shows which there are.")


def _point_in_time(text: str) -> datetime:
    """Parse an RFC 3339 time (UTC without a zone), or a duration before now (2h, 30m)."""
    with suppress(ValueError):
        time = datetime.fromisoformat(text)
        return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    try:
        return datetime.now(UTC) - timedelta(seconds=Duration.parse(text).seconds)
    except ValueError as error:
        message = f"write a time like 2026-01-31T12:00:00Z, or how long ago it was, like 2h ({error})"
        raise click.BadParameter(message) from None


def with_selection(command: Command) -> Command:
    """Add -f, --secrets-dir and the filters to a command, which receives them as ``source`` and ``selection``."""

    @with_manifests
    @click.option("--subscription", metavar="NAME", help="Of this subscription (namespace/name, or the name alone).")
    @click.option("--id", "id_", metavar="ID", help="The number in the list, or the event's id.")
    @click.option("--key", help="Of this key.")
    @click.option("--type", type=_LIKE, metavar="PATTERN", help="Of event types like this: order.*")
    @click.option("--since", type=_point_in_time, metavar="TIME", help=_SINCE)
    @click.option("--until", type=_point_in_time, metavar="TIME", help="Before this time, or so long ago.")
    @click.option("--error", "--reason", "error", metavar="TEXT", help="With this in the reason or the error.")
    @click.option(
        "--limit", type=click.IntRange(min=1), help=f"At most so many. [default: {_DEFAULT_LIMIT}; filtered: all]"
    )
    @click.option("--all", "all_", is_flag=True, help="All of them.")
    @wraps(command)
    def wrapper(id_: str | None, limit: int | None, all_: bool, **options: Any) -> Any:
        by_id = Selection() if id_ is None else Selection.of_id(id_)
        fields = {name: options.pop(name) for name in _FILTER_OPTIONS}
        selection = replace(by_id, filter=replace(by_id.filter, **fields), limit=limit, all=all_)
        if limit is None and not all_ and not selection.narrows:
            selection = Selection(limit=_DEFAULT_LIMIT)
        return command(selection=selection, **options)

    return wrapper
