"""Dead letters of a consumer, written to a topic of its own on the broker that it reads.

A write returns only after the broker's acknowledgement, so that the engine commits nothing past an event whose dead
letter is not stored. The relays' sinks do the writing: idempotent producer, acks=all, order per key.

If the topic refuses a dead letter, most often because it is too large, less of it is written, in this order: the
envelope; the original value; the original value without the text of the error; the coordinates of the original only.
Header ``mailboat-dead-truncated`` says what is missing. If even the last form is refused, the event stays parked.
"""

import asyncio
import logging
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

from mailboat.consumer.broker.envelope import (
    TRUNCATED,
    WITHOUT_VALUE,
    Headers,
    cause_headers,
    envelope,
    with_content_type,
)
from mailboat.consumer.broker.interfaces import DeadLettersUnavailable, DeadRecord
from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided
from mailboat.model import Message, verbatim
from mailboat.sinks.protocol import Sink

log = logging.getLogger(__name__)

_UNDECIDED_TRIES: Final = 3
_OWN_FIELDS: Final = (
    ("spec.sink.kafka.topic", "spec.delivery.deadLetter.topic"),
    ("spec.sink.pubsub.project and topic", "spec.delivery.deadLetter.topic"),
    ("spec.sink.", "spec.source."),
    ("the relay's", "the consumer's"),
    ("the relay", "the consumer"),
    ("this relay", "this consumer"),
)
"""Fields of a relay's manifest in the sinks' errors, and those of a consumer's manifest."""


class DeadLetterFormat(Enum):
    """Value of a dead letter: the event and the cause as one JSON document, or the original value."""

    ENVELOPE = "Envelope"
    RAW = "Raw"


class Form(NamedTuple):
    """One form in which a dead letter can be written."""

    truncated: str | None
    value: bytes | None
    headers: Headers


def forms(letter: DeadRecord, format: DeadLetterFormat, *, spring: bool) -> Iterator[Form]:
    """Yield the forms of a dead letter, the complete one first."""
    original = letter.record.original
    cause = cause_headers(letter, spring=spring)
    if format is DeadLetterFormat.ENVELOPE:
        yield Form(None, envelope(letter), (*with_content_type(original.headers), *cause))
    truncated = "envelope" if format is DeadLetterFormat.ENVELOPE else None
    yield Form(truncated, original.value, _marked((*original.headers, *cause), truncated))
    short = cause_headers(letter, spring=spring, error=False)
    yield Form("error", original.value, _marked((*original.headers, *short), "error"))
    event_id = (("event_id", str(letter.record.event.id).encode()),)
    yield Form(WITHOUT_VALUE, None, _marked((*event_id, *short), WITHOUT_VALUE))


def _marked(headers: Headers, truncated: str | None) -> Headers:
    return headers if truncated is None else (*headers, (TRUNCATED, truncated.encode()))


class DeadLetterTopic:
    """Writes dead letters with a sink. See ``protocol.DeadLetters``."""

    def __init__(self, sink: Sink, topic: str, *, format: DeadLetterFormat = DeadLetterFormat.ENVELOPE) -> None:
        """``sink`` is the sink of the dead-letter topic; the caller builds it with the settings of the source."""
        self._sink = sink
        self._topic = topic
        self._format = format
        self._kafka = sink.traits.header_prefix == "ce_"
        self._opened = False
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        async with self._opening:
            if self._opened:
                return
            try:
                await self._sink.open()
            except SinkUnavailable as error:
                raise self._unavailable(error) from error
            self._opened = True

    async def write(self, letter: DeadRecord) -> None:
        await self.open()
        refusal: EventRefused | None = None
        for form in forms(letter, self._format, spring=self._kafka):
            refusal = await self._publish(self._message(letter, form))
            if refusal is None:
                if form.truncated is not None:
                    self._log_truncated(letter, form.truncated)
                return
        raise DeadLettersUnavailable(
            f"dead-letter topic {self._topic} refuses the dead letter of event {letter.record.event.id}, even without "
            f"its value ({refusal}); raise the topic's max.message.bytes, or check its policies"
        )

    async def close(self) -> None:
        self._opened = False
        await self._sink.close()

    async def _publish(self, message: Message) -> EventRefused | None:
        """Publish and return the refusal, if the broker refused this message."""
        error: DeliveryError | None = None if self._kafka else self._sink.refusal(message)
        for _ in range(_UNDECIDED_TRIES):
            if error is None:
                error = (await self._sink.publish([message])).get(0)
            if error is None or isinstance(error, EventRefused):
                return error
            if not isinstance(error, Undecided):
                break
            undecided, error = error, None  # it was behind a failed message
        raise self._unavailable(error or undecided)

    def _message(self, letter: DeadRecord, form: Form) -> Message:
        key, event_id = letter.record.original.key, str(letter.record.event.id)
        if self._kafka:
            return verbatim(event_id, key, form.value, form.headers)
        attributes = {name: value.decode(errors="backslashreplace") for name, value in form.headers}
        return Message(event_id, None if key is None else key.decode(), form.value, attributes)

    def _unavailable(self, error: DeliveryError) -> DeadLettersUnavailable:
        text = str(error)
        for sink_field, own_field in _OWN_FIELDS:
            text = text.replace(sink_field, own_field)
        return DeadLettersUnavailable(f"dead-letter topic {self._topic}: {text}")

    def _log_truncated(self, letter: DeadRecord, truncated: str) -> None:
        log.warning(
            "Dead letter truncated",
            extra={
                "event_id": str(letter.record.event.id),
                "topic": self._topic,
                "missing": truncated,
                "original": f"{letter.record.original.topic}/{letter.record.original.partition}/"
                f"{letter.record.original.offset}",
            },
        )
