"""``mailboat dlq`` for consumers behind a broker: their dead letters are on a topic, not in a database."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mailboat.cli.printing import columns, counted, moment, payload_text, shortened
from mailboat.cli.selecting import Selection
from mailboat.errors import ConfigError, DeliveryError, SinkUnavailable
from mailboat.runtime.config import load
from mailboat.runtime.secrets import find_secrets
from mailboat.terminals import safe
from mailboat_spec import EventSubscription, full_name
from mailboat_spec.kafka_settings import CONSUMER_ONLY

if TYPE_CHECKING:
    from mailboat.consumer.broker.letter_reader import KafkaLetters
    from mailboat.consumer.broker.replay import Letter, LetterFilter

_HEADER: Final = ("ID", "TYPE", "KEY", "ATTEMPTS", "DIED", "REPLAYS", "REASON", "ERROR")
_TIMEOUT: Final = 30.0
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class ConsumerTopic:
    """The dead-letter topic of one consumer, on Kafka."""

    subscription: str
    """``namespace/name``."""
    topic: str
    origin: str
    group: str
    client: Mapping[str, Any]
    """Settings of librdkafka."""
    secrets: Sequence[str] = ()


def consumer_topic(files: Sequence[Path], secrets_dir: Path | None, selection: Selection) -> ConsumerTopic | None:
    """Return the topic of the selected subscription; None if its dead letters are in a database.

    Without --subscription, the only consumer of the manifests is meant if there is no OutboxRelay.
    """
    manifests = load(files, needs_relay=False)
    consumers = [each for each in manifests.subscriptions if each.spec.source is not None]
    name = selection.wanted.subscription
    if name is not None:
        consumers = [each for each in consumers if name in (full_name(each), each.metadata.name)]
    elif manifests.relays or not consumers:
        return None
    if len(consumers) > 1:
        raise click.UsageError(f"say --subscription: one of {', '.join(map(full_name, consumers))}")
    return _topic_of(consumers[0], secrets_dir) if consumers else None


def _topic_of(consumer: EventSubscription, secrets_dir: Path | None) -> ConsumerTopic:
    source, topic = consumer.spec.source, consumer.dead_letter_topic
    assert source is not None
    assert topic is not None, "a consumer has a default"
    if source.kafka is None:
        raise ConfigError(
            f"{full_name(consumer)} reads Pub/Sub: `mailboat dlq` reads dead-letter topics on Kafka only. Pull topic"
            f" {topic} with a subscription of its own."
        )
    reference = source.kafka.config_secret_ref
    secrets = {} if reference is None else find_secrets(secrets_dir, os.environ).all(reference.name)
    servers = ",".join(source.kafka.bootstrap_servers)
    given = {name: value for name, value in {**source.kafka.config, **secrets}.items() if name not in CONSUMER_ONLY}
    client = {"client.id": "mailboat", **given, "bootstrap.servers": servers}
    return ConsumerTopic(
        full_name(consumer), topic, source.kafka.topic, consumer.group, client, tuple(secrets.values())
    )


def list_letters(topic: ConsumerTopic, selection: Selection, *, replayed: bool, as_json: bool) -> None:
    """Print dead letters after the progress of replays; with ``replayed``, all that the topic still has."""
    wanted = _filter(selection)
    with _letters(topic, wanted.__class__()) as letters:
        after = {} if replayed else letters.committed()
        found = deque(_matching(letters, wanted, after), maxlen=selection.limit)
    chosen = sorted(found, key=lambda letter: letter.content.failed_at or _EPOCH)
    if as_json:
        for letter in chosen:
            click.echo(json.dumps(_fields(letter), ensure_ascii=False))
        return
    if not chosen:
        click.echo("no dead letters" + (" match" if wanted.narrows else ""))
        return
    for line in columns(_HEADER, map(_cells, chosen)):
        click.echo(line)
    if selection.limit is not None and len(chosen) >= selection.limit:
        click.echo(f"(the newest {selection.limit}; --all shows all of them)", err=True)


def show_letters(topic: ConsumerTopic, selection: Selection) -> None:
    """Print everything about the selected dead letters."""
    wanted = _filter(selection)
    with _letters(topic, wanted.__class__()) as letters:
        found = list(_matching(letters, wanted, {}))
    if not found:
        raise _no_such(selection)
    click.echo("\n\n".join(map(_described, found)))


async def replay_letters(
    topic: ConsumerTopic, selection: Selection, *, dry_run: bool, rate: float | None, again: bool
) -> None:
    """Publish the selected dead letters to the topic of origin."""
    from mailboat.consumer.broker.replay import LetterFilter, Replay
    from mailboat.sinks.kafka import KafkaSink

    wanted = _filter(selection)
    sink = KafkaSink(topic.origin, dict(topic.client), delivery_timeout=_TIMEOUT, secrets=topic.secrets)
    try:
        if not dry_run:
            await sink.open()
        with _letters(topic, wanted) as letters:
            after = {} if again or selection.by_id else letters.committed()
            if wanted.narrows and not again and not selection.by_id:
                with _letters(topic, LetterFilter()) as unfiltered:
                    after = _further(after, unfiltered.committed())
            replay = Replay(
                letters, sink, topic.subscription, wanted,
                after=after, rate=rate, limit=selection.limit, dry_run=dry_run, again=again,
            )  # fmt: skip
            try:
                async for letter in replay.run():
                    if dry_run:
                        click.echo(f"{letter.place} {_named(letter)}: would be replayed")
            except DeliveryError as error:
                raise ConfigError(
                    f"{counted(replay.progress.replayed, 'dead letter')} replayed, then topic {topic.origin} did not"
                    f" take one: {_told(error)}\nRun the same command again to continue."
                ) from error
    except SinkUnavailable as error:
        raise ConfigError(_told(error)) from error
    finally:
        await sink.close()
    for letter in replay.progress.loops:
        click.echo(f"{letter.place} {_named(letter)}: was replayed {letter.replays} times; say --again to replay it")
    for letter in replay.progress.without_value:
        click.echo(
            f"{letter.place} {_named(letter)}: not replayed, it was too large and is gone from {_origin(letter)}"
        )
    if selection.by_id and not replay.progress.replayed and not replay.progress.loops:
        raise _no_such(selection)
    click.echo(f"{counted(replay.progress.replayed, 'dead letter')} {'would be replayed' if dry_run else 'replayed'}")


def _further(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    return {partition: max(one.get(partition, 0), other.get(partition, 0)) for partition in {*one, *other}}


# -- parts -----------------------------------------------------------------------------------------------------------


def _filter(selection: Selection) -> LetterFilter:
    from mailboat.consumer.broker.replay import LetterFilter

    wanted = selection.wanted
    if wanted.number is not None:
        raise click.BadParameter(f"{wanted.number}: write PARTITION:OFFSET as in the list, or the event's id")
    return LetterFilter(
        selection.place, wanted.event_id, wanted.key, wanted.type, wanted.since, wanted.until, wanted.error
    )


@contextmanager
def _letters(topic: ConsumerTopic, wanted: LetterFilter) -> Iterator[KafkaLetters]:
    from mailboat.consumer.broker.letter_reader import KafkaLetters

    try:
        with KafkaLetters(topic.client, topic.topic, wanted.group(topic.group)) as letters:
            yield letters
    except SinkUnavailable as error:
        raise ConfigError(f"dead letters of {topic.subscription}: {_told(error)}") from error


def _told(error: DeliveryError) -> str:
    text = str(error).replace("spec.sink.kafka.topic", "spec.delivery.deadLetter.topic")
    return text.replace("spec.sink.", "spec.source.")


def _matching(letters: KafkaLetters, wanted: LetterFilter, after: Mapping[int, int]) -> Iterator[Letter]:
    from mailboat.consumer.broker.replay import Letter

    for message in letters.read(after):
        letter = Letter.of(message)
        if letter is not None and wanted.accepts(letter):
            yield letter


def _cells(letter: Letter) -> tuple[str, ...]:
    return (
        letter.place,
        letter.event.type,
        "-" if letter.event.key is None else shortened(letter.event.key, 40),
        str(letter.content.attempts),
        moment(letter.content.failed_at),
        str(letter.replays),
        letter.content.reason,
        shortened(_last_line(letter.content.error), 100),
    )


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


def _described(letter: Letter) -> str:
    fields = {name.replace("_", " "): value for name, value in _fields(letter).items() if name != "error"}
    width = max(map(len, fields))
    lines = [f"{name:<{width}}  {_field(value)}" for name, value in fields.items()]
    payload = payload_text(letter.event.payload, letter.event.content_type)
    return "\n".join([*lines, "error", safe(letter.content.error, lines=True), "payload", payload])


def _field(value: object) -> str:
    if value is None or value == {}:
        return "-"
    return safe(json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value))


def _origin(letter: Letter) -> str:
    original = letter.content.original
    return f"topic {original.topic}, partition {original.partition}, offset {original.offset}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _named(letter: Letter) -> str:
    key = f" key {shortened(letter.event.key, 40)}" if letter.event.key is not None else ""
    return f"{shortened(letter.event.type, 60)}{key}"


def _no_such(selection: Selection) -> ConfigError:
    return ConfigError(f"there is no dead letter {selection.id}. `mailboat dlq list --replayed` shows which there are.")
