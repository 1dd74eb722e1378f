"""Replay of a consumer's dead letters: from the dead-letter topic to the topic of origin, addressed to the consumer.

A replayed message has the value, the key and the headers of the original, so it goes to the partition of its key and to
the consumer that owns that. Headers address it: consumers of other subscriptions skip it. Progress is committed after
the broker acknowledged what was published, so an interrupted replay repeats some messages and leaves none out.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.envelope import NotADeadLetter, Restored, replay_group, restored
from mailboat.consumer.broker.interfaces import Original
from mailboat.consumer.received_event import Event
from mailboat.model import Message, verbatim
from mailboat.sinks.protocol import Sink
from mailboat.store.admin.selection import Match

MAX_REPLAYS: Final = 10
"""A dead letter that was replayed so often is not replayed again unless asked for: this ends loops of scripts."""
_COUNT: Final = "mailboat-replay-count"
_REPLAY_HEADERS: Final = frozenset({"mailboat-replay", "mailboat-replay-for", "mailboat-replay-id", _COUNT})
_BATCH: Final = 100
_ANY: Final = Match("")


@dataclass(frozen=True, slots=True)
class Letter:
    """One message of a dead-letter topic."""

    message: Original
    content: Restored
    event: Event
    """The event of the original message."""

    @classmethod
    def of(cls, message: Original) -> Letter | None:
        """Return the letter; None for a message that is no dead letter of a consumer."""
        try:
            content = restored(message)
        except NotADeadLetter:
            return None
        return cls(message, content, decode(content.original).event)

    def complete(self, original: Original) -> Letter:
        """Return a truncated letter with the original, which was read at its origin."""
        content = replace(self.content, original=original, truncated=None)
        return replace(self, content=content, event=decode(original).event)

    @property
    def place(self) -> str:
        """Partition and offset on the dead-letter topic; on Pub/Sub, the message id."""
        partition, offset = self.message.partition, self.message.offset
        return str(offset) if partition is None else f"{partition}:{offset}"

    @property
    def replays(self) -> int:
        """How often the event was replayed before this death."""
        count = dict(self.content.original.headers).get(_COUNT, b"0")
        return int(count) if count.isdigit() else 0


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Selection of dead letters on a topic: as of dead letters in a database (``wanted``), or by ``place``."""

    wanted: Match = _ANY
    """Its outbox, subscription and number do not count."""
    place: str | None = None
    """Partition and offset, or the message id, as ``Letter.place``."""

    def accepts(self, letter: Letter) -> bool:
        died, wanted = letter.content.failed_at, self.wanted
        text = f"{letter.content.reason} {letter.content.error}".lower()
        return (
            (self.place is None or letter.place == self.place)
            and (wanted.event_id is None or str(letter.event.id) == wanted.event_id)
            and (wanted.key is None or letter.event.key == wanted.key)
            and (wanted.type is None or _like(wanted.type).fullmatch(letter.event.type) is not None)
            and (wanted.since is None or (died is not None and died >= wanted.since))
            and (wanted.until is None or (died is not None and died < wanted.until))
            and (wanted.error is None or wanted.error.lower() in text)
        )

    @property
    def narrows(self) -> bool:
        return self.place is not None or self.wanted.narrows

    def group(self, consumers_group: str) -> str:
        """Return the consumer group that stores the progress of replays with this filter."""
        base = replay_group(consumers_group)
        return f"{base}.{hashlib.sha256(repr(self).encode()).hexdigest()[:12]}" if self.narrows else base


def _like(pattern: str) -> re.Pattern[str]:
    parts = re.findall(r"\\.|.", pattern, re.DOTALL)
    translated = {"%": ".*", "_": "."}
    return re.compile("".join(translated.get(part) or re.escape(part[-1]) for part in parts), re.DOTALL)


def replay_message(letter: Letter, consumer: str) -> Message:
    """Return the original message with the headers of a replay. ``consumer``: ``namespace/name``."""
    original = letter.content.original
    headers = [
        *((name, value) for name, value in original.headers if name not in _REPLAY_HEADERS),
        ("mailboat-replay", b"true"),
        ("mailboat-replay-for", consumer.encode()),
        ("mailboat-replay-id", str(letter.event.id).encode()),
        (_COUNT, str(letter.replays + 1).encode()),
    ]
    if original.partition is None:
        attributes = {name: value.decode(errors="backslashreplace") for name, value in headers}
        key = None if original.key is None else original.key.decode()
        return Message(str(letter.event.id), key, original.value, attributes)
    return verbatim(str(letter.event.id), original.key, original.value, headers)


@dataclass(slots=True)
class ReplayProgress:
    """What a replay did so far."""

    replayed: int = 0
    loops: list[Letter] = field(default_factory=list)
    """Dead letters that were replayed too often."""
    without_value: list[Letter] = field(default_factory=list)
    """Dead letters whose original was too large for the dead-letter topic, and is not on its own topic any more."""


class Letters(Protocol):
    """A reader of a dead-letter topic."""

    async def next(self, size: int) -> Sequence[Original]:
        """Return the next messages, per partition in order; none at the end."""

    async def settle(self, read: Sequence[Original], replayed: Collection[Original]) -> None:
        """Store that ``replayed`` were published. ``read`` are all messages up to the first that was not accepted."""

    async def fetch(self, origin: Original) -> Original | None:
        """Return the message at the topic, partition and offset of ``origin``; None if it can't be read any more."""


class Replay:
    """One run of a replay. Yields each dead letter after it is published, or at once in a dry run."""

    def __init__(
        self,
        letters: Letters,
        sink: Sink,
        consumer: str,
        filter_: LetterFilter,
        *,
        rate: float | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        again: bool = False,
    ) -> None:
        self._letters = letters
        self._sink = sink
        self._consumer = consumer
        self._filter = filter_
        self._rate = rate
        self._limit = limit
        self._dry_run = dry_run
        self._again = again
        self.progress = ReplayProgress()

    async def run(self) -> AsyncIterator[Letter]:
        """Publish dead letters in their order. Raises DeliveryError at the first one that is not accepted."""
        size = _BATCH if self._rate is None else min(_BATCH, max(1, int(self._rate)))
        pause = 0.0
        while not self._is_full and (messages := await self._letters.next(size)):
            await asyncio.sleep(pause)
            read, chosen = self._choose([(message, await self._matching_letter(message)) for message in messages])
            if not self._dry_run:
                await self._publish(chosen, read)
                pause = 0.0 if self._rate is None else len(chosen) / self._rate
            for letter in chosen:
                yield letter

    async def _matching_letter(self, message: Original) -> Letter | None:
        letter = Letter.of(message)
        if letter is None or not self._filter.accepts(letter):
            return None
        if letter.content.has_value:
            return letter
        original = await self._letters.fetch(letter.content.original)
        return letter if original is None else letter.complete(original)

    @property
    def _is_full(self) -> bool:
        return self._limit is not None and self.progress.replayed >= self._limit

    def _choose(self, batch: Sequence[tuple[Original, Letter | None]]) -> tuple[list[Original], list[Letter]]:
        """Return the messages up to the limit, and the dead letters among them that are to be replayed."""
        read: list[Original] = []
        chosen: list[Letter] = []
        for message, letter in batch:
            if self._is_full:
                break
            read.append(message)
            if letter is None:
                continue
            if not letter.content.has_value:
                self.progress.without_value.append(letter)
            elif letter.replays >= MAX_REPLAYS and not self._again:
                self.progress.loops.append(letter)
            else:
                chosen.append(letter)
                self.progress.replayed += 1
        return read, chosen

    async def _publish(self, chosen: list[Letter], read: list[Original]) -> None:
        failures = await self._sink.publish([replay_message(letter, self._consumer) for letter in chosen])
        failed = [chosen[index].message for index in failures]
        self.progress.replayed -= len(failed)
        replayed = [letter.message for letter in chosen if letter.message not in failed]
        await self._letters.settle(_before(read, failed), replayed)
        if failures:
            raise next(iter(failures.values()))


def _before(read: list[Original], failed: list[Original]) -> list[Original]:
    """Return the messages before the first failed one of their partition."""
    ends: dict[int | None, int] = {}
    for number, message in enumerate(read):
        if message in failed:
            ends.setdefault(message.partition, number)
    return [each for number, each in enumerate(read) if number < ends.get(each.partition, len(read))]
