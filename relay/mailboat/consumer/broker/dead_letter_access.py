"""Access to the dead-letter topic of a consumer, for ``mailboat dlq``: its messages, and the sink of a replay."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from mailboat.consumer.broker.replay import Letter, LetterFilter, Letters
from mailboat.errors import ConfigError, DeliveryError, SinkUnavailable
from mailboat.runtime.secrets import Secrets
from mailboat.sinks.protocol import Sink
from mailboat_spec import EventSubscription, KafkaSource, PubSubSource, full_name
from mailboat_spec.resources.kafka_settings import CONSUMER_ONLY

_TIMEOUT: Final = 30.0
_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class DeadLetterAccess:
    """The dead letters of one subscription with a source."""

    consumer: EventSubscription
    secrets: Secrets

    @property
    def name(self) -> str:
        """namespace/name of the subscription."""
        return full_name(self.consumer)

    @property
    def topic(self) -> str:
        topic = self.consumer.dead_letter_topic
        assert topic is not None, "a consumer has a default"
        return topic

    async def matching(self, filter_: LetterFilter, *, everything: bool) -> list[Letter]:
        """Return the dead letters that the filter accepts. ``everything``: as of ``opened``."""
        found: list[Letter] = []
        async with self.opened(LetterFilter(), everything=everything) as (letters, _):
            while messages := await letters.next(_PAGE):
                each = (Letter.of(message) for message in messages)
                found += (letter for letter in each if letter is not None and filter_.accepts(letter))
        return found

    @asynccontextmanager
    async def opened(self, filter_: LetterFilter, *, everything: bool) -> AsyncIterator[tuple[Letters, Sink]]:
        """Connect to the dead-letter topic and to the topic of origin, the latter without opening it.

        ``everything``: begin at the oldest dead letter, not after the progress of earlier replays.
        """
        assert self.consumer.spec.source is not None, "the resource has a source"
        chosen = self.consumer.spec.source.chosen
        try:
            opened = (
                self._on_kafka(chosen, filter_, everything)
                if isinstance(chosen, KafkaSource)
                else self._on_pubsub(chosen)
            )
            async with opened as (letters, sink):
                try:
                    yield letters, sink
                finally:
                    await sink.close()
        except SinkUnavailable as error:
            raise ConfigError(f"dead letters of {self.name}: {message_of(error)}") from error

    @asynccontextmanager
    async def _on_kafka(
        self, source: KafkaSource, filter_: LetterFilter, everything: bool
    ) -> AsyncIterator[tuple[Letters, Sink]]:
        from mailboat.consumer.broker.kafka_dead_letters import KafkaLetters, KafkaPages
        from mailboat.sinks.kafka import KafkaSink

        values = {} if source.config_secret_ref is None else self.secrets.all(source.config_secret_ref.name)
        client, group = client_of(source, values), self.consumer.group
        after: dict[int, int] = {}
        with KafkaLetters(client, self.topic, filter_.group(group)) as letters:
            if not everything:
                after = letters.committed()
                with KafkaLetters(client, self.topic, LetterFilter().group(group)) as unfiltered:
                    for partition, offset in unfiltered.committed().items():
                        after[partition] = max(offset, after.get(partition, 0))
            sink = KafkaSink(source.topic, client, delivery_timeout=_TIMEOUT, secrets=tuple(values.values()))
            yield KafkaPages(letters, after), sink

    @asynccontextmanager
    async def _on_pubsub(self, source: PubSubSource) -> AsyncIterator[tuple[Letters, Sink]]:
        from mailboat.consumer.broker.pubsub_dead_letters import PubSubLetters
        from mailboat.sinks.pubsub import PubSubSink
        from mailboat.sinks.pubsub.channel import PubSubEndpoint

        key = source.credentials_secret_ref
        key_file = None if key is None else self.secrets.read(key.name, key.key)
        emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
        destination = PubSubEndpoint.choose(source.endpoint, emulator, key_file, "spec.source.pubsub")
        letters = PubSubLetters(destination, source.project, self.topic)
        try:
            await letters.open()
            origin = await letters.topic_of(f"projects/{source.project}/subscriptions/{source.subscription}")
            _, project, _, name = origin.split("/")
            yield letters, PubSubSink(project, name, destination, delivery_timeout=_TIMEOUT)
        finally:
            await letters.close()


def client_of(source: KafkaSource, secrets: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of librdkafka that a source shares with the producer of dead letters."""
    given = {name: value for name, value in {**source.config, **secrets}.items() if name not in CONSUMER_ONLY}
    return {"client.id": "mailboat", **given, "bootstrap.servers": ",".join(source.bootstrap_servers)}


def message_of(error: DeliveryError) -> str:
    """Return the message of a sink in the words of a source, for the user of the command line."""
    text = str(error).replace("spec.sink.kafka.topic", "spec.delivery.deadLetter.topic")
    text = text.replace("the relay", "this computer")
    return text.replace("spec.sink.", "spec.source.")
