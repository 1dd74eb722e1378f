"""Which dead letters or parked events a person means: the options, and what they say to the database."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

import click

from mailboat.cli.options import like_pattern, point_in_time
from mailboat.outbox.deadletters import Match

_DEFAULT_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Selection:
    """The filters that were given."""

    subscription: str | None = None
    number: int | None = None
    event_id: str | None = None
    key: str | None = None
    type: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    limit: int | None = None
    all: bool = False

    @classmethod
    def of_id(cls, text: str) -> Selection:
        """By the number in the list, or by the event's id."""
        number, event_id = _id(text)
        return cls(number=number, event_id=event_id)

    @property
    def by_id(self) -> bool:
        return self.number is not None or self.event_id is not None

    @property
    def narrows(self) -> bool:
        return self.match("").narrows

    def match(self, outbox: str) -> Match:
        return Match(
            outbox,
            subscription=self.subscription,
            number=self.number,
            event_id=self.event_id,
            key=self.key,
            type=self.type,
            since=self.since,
            until=self.until,
            error=self.error,
        )


def _id(text: str) -> tuple[int | None, str | None]:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text), None
    try:
        return None, str(uuid.UUID(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number nor an event's id (a UUID)", param_hint="ID") from None


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """The filters; the command gets them as ``selection``."""

    @click.option("--subscription", metavar="NAME", help="Of this subscription (namespace/name, or the name alone).")
    @click.option("--id", "id_", metavar="ID", help="The number in the list, or the event's id.")
    @click.option("--key", help="Of this key.")
    @click.option("--type", "type_", type=like_pattern, metavar="PATTERN", help="Of event types like this: order.*")
    @click.option(
        "--since",
        type=point_in_time,
        metavar="TIME",
        help="Not before this time, or so long ago: 2026-01-31T12:00:00Z, 2h.",
    )
    @click.option("--until", type=point_in_time, metavar="TIME", help="Before this time, or so long ago.")
    @click.option("--error", metavar="TEXT", help="With this in the reason or the error.")
    @click.option(
        "--limit", type=click.IntRange(min=1), help=f"At most so many. [default: {_DEFAULT_LIMIT}; filtered: all]"
    )
    @click.option("--all", "all_", is_flag=True, help="All of them.")
    @wraps(command)
    def selecting(
        *,
        subscription: str | None,
        id_: str | None,
        key: str | None,
        type_: str | None,
        since: datetime | None,
        until: datetime | None,
        error: str | None,
        limit: int | None,
        all_: bool,
        **others: Any,
    ) -> None:
        number, event_id = _id(id_) if id_ is not None else (None, None)
        selection = Selection(subscription, number, event_id, key, type_, since, until, error, limit, all_)
        if limit is None and not all_ and not selection.narrows:
            selection = Selection(limit=_DEFAULT_LIMIT)
        command(selection=selection, **others)

    return selecting
