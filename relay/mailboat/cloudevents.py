"""Wire format of events: CloudEvents in binary mode, CloudEvents as one JSON document, outbox columns, or raw.

Each format sends only its own headers (docs/messages.md), since headers are most of a producer's CPU time. They come
first and can't be overwritten by the application's. Application data is passed through unchanged: headers are parsed
for validation, the payload only for ``CloudEventsJson``, to detect JSON.

A tombstone (an event without payload) has no value in any format, so that log compaction treats it as one.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Final, NoReturn

from mailboat.errors import EventRefused
from mailboat.model import TOO_LARGE, Message, OutboxEvent
from mailboat_spec import Format

Headers = dict[str, str]
"""A dictionary of strings is not tracked by the garbage collector; a list of pairs would cost one object per header."""

_CLOUDEVENTS_ATTRIBUTES: Final = (
    "id", "source", "specversion", "type", "time", "subject", "aggregatetype", "partitionkey", "datacontenttype",
    "traceparent",
)  # fmt: skip
_OWN_NAMES: Final = ("event_id", "event_type", "aggregate_type", "aggregate_id", "created_at", "content-type")
_FIRST_TIME: Final = "0001-01-01T00:00:00.000000Z"
_LAST_TIME: Final = "9999-12-31T23:59:59.999999Z"
_MAX_ERROR_BYTES: Final = 1024

_new_outgoing: Final = tuple.__new__  # a third of the named constructor's cost, paid per event


@dataclass(frozen=True, slots=True)
class DeadLetterNotice:
    """An event that gets no further attempt, and the failures that caused it."""

    event: OutboxEvent
    sequence: int
    partition: int
    generation: int
    attempts: int
    reason: str
    error: str
    first_failed_at: str | None
    """RFC 3339. None if the event failed only now."""


class MessageEncoder:
    """Encodes the events of a subscription as messages of one format. Values common to many are built in advance."""

    def __init__(self, format: Format | str, *, source: str, header_prefix: str) -> None:
        self.format = Format(format)
        self.source = source
        self.header_prefix = header_prefix
        self._reserved = {*_OWN_NAMES, *(f"{header_prefix}{attribute}" for attribute in _CLOUDEVENTS_ATTRIBUTES)}
        self._stamp = lru_cache(maxsize=4096)(self._new_stamp)

    def encode(
        self, event: OutboxEvent, *, sequence: int, partition: int, generation: int, attempt: int, replay: bool = False
    ) -> Message:
        """Encode one message. Raise ``EventRefused`` if its headers, type, time or size make that impossible."""
        stamp = self._stamp(attempt, replay)
        (message,) = self._encoded((event,), (sequence,), f"{generation}.{partition}.", stamp)
        return message

    def encode_all(
        self, events: Iterable[OutboxEvent], sequences: Iterable[int], *, partition: int, generation: int
    ) -> Iterator[Message]:
        """Yield the messages of first attempts. Raise at an event for which :meth:`encode` would raise."""
        return self._encoded(events, sequences, f"{generation}.{partition}.", self._stamp(1, False))

    def _encoded(
        self, events: Iterable[OutboxEvent], sequences: Iterable[int], sequence_prefix: str, stamp: Headers
    ) -> Iterator[Message]:
        # Hot path: attributes are cached in locals, events unpacked once, and assignments written out, since a call or
        # a loop over names would cost more than the assignments.
        format, copy_of_stamp = self.format, stamp.copy
        prefix = self.header_prefix
        ce_id, ce_type, ce_time, ce_subject = f"{prefix}id", f"{prefix}type", f"{prefix}time", f"{prefix}subject"
        ce_aggregatetype, ce_partitionkey = f"{prefix}aggregatetype", f"{prefix}partitionkey"
        for event, sequence in zip(events, sequences, strict=True):
            (_, event_id, type_, aggregate_type, aggregate_id, key, value, content_type, application, _, traceparent,
             created_at, _) = event  # fmt: skip
            if not type_ or created_at[-1:] != "Z":
                _refuse_row(event)
            headers = copy_of_stamp()
            headers["mailboat-sequence"] = f"{sequence_prefix}{sequence}"
            if format is Format.CLOUD_EVENTS:
                headers[ce_id] = event_id
                headers[ce_type] = type_
                headers[ce_time] = created_at
                headers["content-type"] = content_type
                if aggregate_id is not None:
                    headers[ce_subject] = aggregate_id
                if aggregate_type is not None:
                    headers[ce_aggregatetype] = aggregate_type
                if key is not None and key != aggregate_id:
                    headers[ce_partitionkey] = key
                if traceparent is not None:
                    headers[f"{prefix}traceparent"] = traceparent
            elif format is Format.CLOUD_EVENTS_JSON:
                if value is None:  # no document: the attributes are in headers
                    headers["content-type"] = content_type
                    attributes = self._attributes(event)
                    del attributes["datacontenttype"]
                    headers |= {f"{prefix}{name}": attribute for name, attribute in attributes.items()}
                else:
                    value = self._document(event, value)
            else:
                headers["event_id"] = event_id
                if format is Format.OUTBOX:  # the headers are named like the columns
                    headers["event_type"] = type_
                    headers["created_at"] = created_at
                    if aggregate_type is not None:
                        headers["aggregate_type"] = aggregate_type
                    if aggregate_id is not None:
                        headers["aggregate_id"] = aggregate_id
                    if traceparent is not None:
                        headers["traceparent"] = traceparent
            if application is not None:
                headers |= self._application_headers(event, application)
            yield _new_outgoing(Message, (event_id, key, value, headers, None))

    def _attributes(self, event: OutboxEvent) -> Headers:
        attributes = {
            "specversion": "1.0",
            "id": event.event_id,
            "source": self.source,
            "type": event.type,
            "time": event.created_at,
            "datacontenttype": event.content_type,
        }
        if event.aggregate_id is not None:
            attributes["subject"] = event.aggregate_id
        if event.aggregate_type is not None:
            attributes["aggregatetype"] = event.aggregate_type
        if event.key is not None and event.key != event.aggregate_id:
            attributes["partitionkey"] = event.key
        if event.traceparent is not None:
            attributes["traceparent"] = event.traceparent
        return attributes

    def _document(self, event: OutboxEvent, payload: bytes) -> bytes:
        attributes = self._attributes(event)
        head = json.dumps(attributes, ensure_ascii=False, separators=(",", ":")).encode()
        if is_json(event.content_type) and holds_json(payload):
            # Spliced, not parsed and serialized again: numbers and the order of names stay as the application wrote
            # them.
            return head[:-1] + b',"data":' + payload + b"}"
        return head[:-1] + b',"data_base64":"' + base64.b64encode(payload) + b'"}'

    def _application_headers(self, event: OutboxEvent, text: str) -> Headers:
        try:
            headers = json.loads(text)
        except ValueError:
            _refuse_headers(event, "they are not JSON")
        except RecursionError:  # Postgres takes any depth
            _refuse_headers(event, "they are nested too deep")
        if isinstance(headers, str) and headers.startswith(TOO_LARGE):
            raise EventRefused(
                f"event {event.event_id} has {headers.removeprefix(TOO_LARGE)} bytes and was not read, since a relay"
                f" can't carry that: it is in the outbox only, with position {event.id}; send a reference instead",
                reason="TooLarge",
                retryable=False,
            )
        if not isinstance(headers, dict):
            _refuse_headers(event, "they are not a JSON object")
        accepted: Headers = {}
        for name, value in headers.items():
            if not isinstance(value, str):
                _refuse_headers(event, f"{name!r} is not a string")
            if not name or "\0" in name or "\0" in value or not _is_unicode(name) or not _is_unicode(value):
                _refuse_headers(event, f"{name!r} is empty, or holds a NUL or half a character")
            if not self._is_reserved(name.lower(), event):
                accepted[name] = value
        return accepted

    def _is_reserved(self, name: str, event: OutboxEvent) -> bool:
        if name == "traceparent":
            return event.traceparent is not None
        return name in self._reserved or name.startswith("mailboat-")

    def _new_stamp(self, attempt: int, replay: bool) -> Headers:
        """Return the header template: the names that every message has, in order, with their common values."""
        stamp: Headers = {}
        if self.format is Format.CLOUD_EVENTS:
            prefix = self.header_prefix
            stamp |= {f"{prefix}specversion": "1.0", f"{prefix}source": self.source}
            stamp |= dict.fromkeys((f"{prefix}id", f"{prefix}type", f"{prefix}time", "content-type"), "")
        elif self.format is Format.CLOUD_EVENTS_JSON:
            stamp["content-type"] = "application/cloudevents+json; charset=UTF-8"
        stamp["mailboat-sequence"] = ""
        if attempt > 1:
            stamp["mailboat-attempt"] = str(attempt)
        if replay:
            stamp["mailboat-replay"] = "true"
        return stamp


def dead_letter_message(
    encoder: MessageEncoder, notice: DeadLetterNotice, *, topic: str, subscription: str, failed_at: datetime
) -> Message:
    """Return the message for the dead-letter topic: original id, key, payload and headers, plus headers with the cause.

    The payload is never wrapped, in any format of the subscription. If headers, type or time can't be sent (perhaps the
    cause of the dead letter), headers are omitted and type and time replaced by valid values. The row in
    ``mailboat.dead_letters`` has the original values.
    """
    if encoder.format is Format.CLOUD_EVENTS_JSON:
        encoder = MessageEncoder(Format.CLOUD_EVENTS, source=encoder.source, header_prefix=encoder.header_prefix)
    encode = partial(
        encoder.encode,
        sequence=notice.sequence,
        partition=notice.partition,
        generation=notice.generation,
        attempt=max(notice.attempts, 1),
    )
    try:
        message = encode(notice.event)
    except EventRefused:
        message = encode(_sendable(notice.event))
    last_failed_at = failed_at.isoformat().replace("+00:00", "Z")
    why = {
        "mailboat-dead-reason": notice.reason,
        "mailboat-dead-error": bounded_error(notice.error),
        "mailboat-dead-attempts": str(notice.attempts),
        "mailboat-dead-first-failed": notice.first_failed_at or last_failed_at,
        "mailboat-dead-last-failed": last_failed_at,
        "mailboat-dead-subscription": subscription,
    }
    return message._replace(headers=message.headers | why, topic=topic)


def _sendable(event: OutboxEvent) -> OutboxEvent:
    """Return the event with headers removed and type and time replaced, so that it can be encoded."""
    time = event.created_at
    if time[-1:] != "Z":
        time = _FIRST_TIME if time.startswith("-") or time.endswith("BC") else _LAST_TIME
    return event._replace(headers=None, type=event.type or "unknown", created_at=time)


def _refuse_row(event: OutboxEvent) -> NoReturn:
    why = f"its time of creation is {event.created_at}: write one of the years 1 to 9999"
    raise EventRefused(
        f"event {event.event_id} can't be sent: {why if event.type else 'its type is empty'}",
        reason="InvalidEvent",
        retryable=False,
    )


def _refuse_headers(event: OutboxEvent, why: str) -> NoReturn:
    raise EventRefused(
        f"the headers of event {event.event_id} can't be sent: {why}; emit headers as an object of strings",
        reason="InvalidHeaders",
        retryable=False,
    )


def is_json(content_type: str) -> bool:
    """Return whether the media type is JSON or based on JSON."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def holds_json(payload: bytes) -> bool:
    """Return whether the bytes can be embedded in JSON: valid UTF-8 without NaN, which Python would accept."""
    try:
        json.loads(payload.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
    return True


def bounded_error(error: str) -> str:
    """Return the text of an error, cut to the size of a header."""
    encoded = error.encode(errors="replace")
    if len(encoded) <= _MAX_ERROR_BYTES:
        return encoded.decode()
    return encoded[: _MAX_ERROR_BYTES - 3].decode(errors="ignore") + "…"
