"""``mailboat dlq`` for consumers behind a broker: their dead letters are on a topic, not in a database."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mailboat.cli.event_filter import Selection, print_list
from mailboat.cli.output import counted, describe, json_line, moment, named, shortened
from mailboat.errors import ConfigError, DeliveryError, SinkUnavailable
from mailboat.runtime.manifest_files import load
from mailboat.runtime.secrets import find_secrets
from mailboat.terminal_escapes import safe
from mailboat_spec import EventSubscription, full_name
from mailboat_spec.resources.kafka_settings import CONSUMER_ONLY

if TYPE_CHECKING:
    from mailboat.consumer.broker.replay import Letter, LetterFilter, Letters
    from mailboat.sinks.protocol import Sink

_HEADER: Final = ("ID", "TYPE", "KEY", "ATTEMPTS", "DIED", "REPLAYS", "REASON", "ERROR")
_TIMEOUT: Final = 30.0
_PAGE: Final = 500
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class ConsumerTopic:
    """The dead-letter topic of one consumer, and the connection to its broker."""

    subscription: str
    """``namespace/name``."""
    topic: str
    broker: KafkaBroker | PubSubService


@dataclass(frozen=True, slots=True)
class KafkaBroker:
    origin: str
    """Topic of the source."""
    group: str
    client: Mapping[str, Any]
    """Settings of librdkafka."""
    secrets: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PubSubService:
    project: str
    subscription: str
    """Subscription of the source."""
    endpoint: str | None
    key_file: str | None


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
    secrets = find_secrets(secrets_dir, os.environ)
    if source.pubsub is not None:
        key = source.pubsub.credentials_secret_ref
        key_file = None if key is None else secrets.read(key.name, key.key)
        service = PubSubService(source.pubsub.project, source.pubsub.subscription, source.pubsub.endpoint, key_file)
        return ConsumerTopic(full_name(consumer), topic, service)
    assert source.kafka is not None, "the spec demands one of the two"
    reference = source.kafka.config_secret_ref
    values = {} if reference is None else secrets.all(reference.name)
    servers = ",".join(source.kafka.bootstrap_servers)
    given = {name: value for name, value in {**source.kafka.config, **values}.items() if name not in CONSUMER_ONLY}
    client = {"client.id": "mailboat", **given, "bootstrap.servers": servers}
    broker = KafkaBroker(source.kafka.topic, consumer.group, client, tuple(values.values()))
    return ConsumerTopic(full_name(consumer), topic, broker)


def list_letters(topic: ConsumerTopic, selection: Selection, *, replayed: bool, as_json: bool) -> None:
    """Print dead letters after the progress of replays; with ``replayed``, all that the topic still has."""
    wanted = _filter(selection)
    found = deque(asyncio.run(_matching(topic, wanted, everything=replayed)), maxlen=selection.limit)
    chosen = sorted(found, key=lambda letter: letter.content.failed_at or _EPOCH)
    print_list(
        chosen,
        _HEADER,
        _cells,
        to_json=(lambda letter: json.dumps(_fields(letter), ensure_ascii=False)) if as_json else None,
        empty="no dead letters" + (" match" if wanted.narrows else ""),
        limited_to=selection.limited_to(chosen, "newest"),
    )


def show_letters(topic: ConsumerTopic, selection: Selection, *, as_json: bool = False) -> None:
    """Print everything about the selected dead letters; with ``as_json`` the document that was stored."""
    wanted = _filter(selection)
    found = asyncio.run(_matching(topic, wanted, everything=True))
    if not found:
        raise no_such_letter(selection.id)
    if as_json:
        for letter in found:
            click.echo(_document(letter))
        return
    click.echo("\n\n".join(map(_described, found)))


async def replay_letters(
    topic: ConsumerTopic, selection: Selection, *, dry_run: bool, rate: float | None, again: bool
) -> None:
    """Publish the selected dead letters to the topic of origin."""
    from mailboat.consumer.broker.replay import Replay

    wanted = _filter(selection)
    async with _opened(topic, wanted, everything=again or selection.by_id) as (letters, sink):
        if not dry_run:
            await sink.open()
        replay = Replay(
            letters, sink, topic.subscription, wanted, rate=rate, limit=selection.limit, dry_run=dry_run, again=again
        )
        try:
            async for letter in replay.run():
                if dry_run:
                    click.echo(f"{_named(letter)}: would be replayed")
        except DeliveryError as error:
            raise ConfigError(
                f"{counted(replay.progress.replayed, 'dead letter')} replayed, then one was not accepted:"
                f" {_told(error)}\nRun the same command again to continue."
            ) from error
    for letter in replay.progress.loops:
        click.echo(f"{_named(letter)}: was replayed {letter.replays} times; say --again to replay it")
    for letter in replay.progress.without_value:
        click.echo(f"{_named(letter)}: not replayed, too large and gone from {_origin(letter)}")
    if selection.by_id and not replay.progress.replayed and not replay.progress.loops:
        raise no_such_letter(selection.id)
    click.echo(f"{counted(replay.progress.replayed, 'dead letter')} {'would be replayed' if dry_run else 'replayed'}")


@asynccontextmanager
async def _opened(
    topic: ConsumerTopic, wanted: LetterFilter, *, everything: bool
) -> AsyncIterator[tuple[Letters, Sink]]:
    """Connect to the dead-letter topic and to the topic of origin, the latter without opening it.

    ``everything``: begin at the oldest dead letter, not after the progress of earlier replays.
    """
    try:
        broker = topic.broker
        opened = (
            _on_kafka(topic.topic, broker, wanted, everything)
            if isinstance(broker, KafkaBroker)
            else _on_pubsub(topic.topic, broker)
        )
        async with opened as (letters, sink):
            try:
                yield letters, sink
            finally:
                await sink.close()
    except SinkUnavailable as error:
        raise ConfigError(f"dead letters of {topic.subscription}: {_told(error)}") from error


@asynccontextmanager
async def _on_kafka(
    topic: str, broker: KafkaBroker, wanted: LetterFilter, everything: bool
) -> AsyncIterator[tuple[Letters, Sink]]:
    from mailboat.consumer.broker.kafka_dead_letters import KafkaLetters, KafkaPages
    from mailboat.consumer.broker.replay import LetterFilter
    from mailboat.sinks.kafka import KafkaSink

    after: dict[int, int] = {}
    with KafkaLetters(broker.client, topic, wanted.group(broker.group)) as letters:
        if not everything:
            after = letters.committed()
            with KafkaLetters(broker.client, topic, LetterFilter().group(broker.group)) as unfiltered:
                for partition, offset in unfiltered.committed().items():
                    after[partition] = max(offset, after.get(partition, 0))
        sink = KafkaSink(broker.origin, dict(broker.client), delivery_timeout=_TIMEOUT, secrets=broker.secrets)
        yield KafkaPages(letters, after), sink


@asynccontextmanager
async def _on_pubsub(topic: str, service: PubSubService) -> AsyncIterator[tuple[Letters, Sink]]:
    from mailboat.consumer.broker.pubsub_dead_letters import PubSubLetters
    from mailboat.sinks.pubsub import PubSubSink
    from mailboat.sinks.pubsub.channel import PubSubEndpoint

    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    destination = PubSubEndpoint.choose(service.endpoint, emulator, service.key_file, "spec.source.pubsub")
    letters = PubSubLetters(destination, service.project, topic)
    try:
        await letters.open()
        origin = await letters.topic_of(f"projects/{service.project}/subscriptions/{service.subscription}")
        _, project, _, name = origin.split("/")
        yield letters, PubSubSink(project, name, destination, delivery_timeout=_TIMEOUT)
    finally:
        await letters.close()


# -- parts -----------------------------------------------------------------------------------------------------------


def _filter(selection: Selection) -> LetterFilter:
    from mailboat.consumer.broker.replay import LetterFilter

    wanted = selection.wanted
    place = selection.place if wanted.number is None else str(wanted.number)
    return LetterFilter(replace(wanted, subscription=None, number=None), place)


def _told(error: DeliveryError) -> str:
    text = str(error).replace("spec.sink.kafka.topic", "spec.delivery.deadLetter.topic")
    text = text.replace("the relay", "this computer")
    return text.replace("spec.sink.", "spec.source.")


async def _matching(topic: ConsumerTopic, wanted: LetterFilter, *, everything: bool) -> list[Letter]:
    from mailboat.consumer.broker.replay import Letter, LetterFilter

    found: list[Letter] = []
    async with _opened(topic, LetterFilter(), everything=everything) as (letters, _):
        while messages := await letters.next(_PAGE):
            each = (Letter.of(message) for message in messages)
            found += (letter for letter in each if letter is not None and wanted.accepts(letter))
    return found


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


def _document(letter: Letter) -> str:
    """Return the stored document. A dead letter that was too large for one has only its fields."""
    if letter.content.truncated is None and letter.message.value is not None:
        return json_line(letter.message.value.decode(errors="replace"))
    return json.dumps(_fields(letter), default=str)


def _described(letter: Letter) -> str:
    fields = _fields(letter)
    error = safe(fields.pop("error"), lines=True)
    return describe({**fields, "payload": letter.event.payload}, ("error", error))


def _origin(letter: Letter) -> str:
    original = letter.content.original
    if original.partition is None:
        return f"{original.topic}, message {original.offset}"
    return f"topic {original.topic}, partition {original.partition}, offset {original.offset}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _named(letter: Letter) -> str:
    return f"{letter.place} {named(letter.event.type, letter.event.key)}"


def no_such_letter(id: str) -> ConfigError:
    """Return the error for an id that no dead letter has."""
    return ConfigError(f"there is no dead letter {id}. `mailboat dlq list --replayed` shows which there are.")
