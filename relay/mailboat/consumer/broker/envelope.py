"""The message on a dead-letter topic: its value, its headers, and how the original message is restored from them.

``Envelope`` is one JSON document with the event, the cause and the origin. ``Raw`` keeps the original value. In both,
the original headers are kept and headers with the cause follow, so that tools need not parse the value.
:func:`restored` returns the original message without a change of a byte, from either format.
"""

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from mailboat.cloudevents import bounded_error, holds_json, is_json
from mailboat.consumer.broker.interfaces import DeadRecord, Original
from mailboat.consumer.broker.json_members import members
from mailboat.consumer.handler_outcomes import LONGEST_ERROR

Headers = tuple[tuple[str, bytes], ...]

CONTENT_TYPE: Final = "application/vnd.mailboat.dead-letter+json"
_CONTENT_TYPE: Final = CONTENT_TYPE.encode()
REASON: Final = "mailboat-dead-reason"
"""First of the added headers: on Kafka, the original headers end before its last occurrence."""
CONSUMER: Final = "mailboat-dead-subscription"
TOPIC, PARTITION, OFFSET = "mailboat-dead-topic", "mailboat-dead-partition", "mailboat-dead-offset"
TRUNCATED: Final = "mailboat-dead-truncated"
WITHOUT_VALUE: Final = "value"
"""Value of ``TRUNCATED`` if the original is not in the dead letter."""
_MARGIN: Final = (b"[" * 50, b"]" * 50)
"""Nesting added by a check, so that a reader at another depth of the stack can parse what was embedded."""
_SPRING: Final = "kafka_dlt-"
_OWN: Final = "mailboat-dead-"


class NotADeadLetter(ValueError):
    """The message does not have the form of a dead letter."""


# -- writing ---------------------------------------------------------------------------------------------------------


def envelope(letter: DeadRecord) -> bytes:
    """Return the JSON document."""
    original = letter.record.original
    event, structured = _event(letter)
    source: dict[str, Any] = {
        "topic": original.topic,
        "partition": original.partition,
        "offset": original.offset,
        "timestamp": None if original.timestamp is None else moment(original.timestamp),
        "key": _readable(original.key),
        "headers": _header_object(original.headers),
    }
    if structured:
        source["structured"] = True
    rest = {
        "reason": letter.refusal.reason,
        "failedAt": moment(letter.failed_at),
        "error": letter.refusal.error[-LONGEST_ERROR:],
        "attempts": letter.attempts,
        "consumer": letter.consumer,
        "source": source,
    }
    return b'{"originalEvent":' + event + b"," + _json(rest)[1:]


def _event(letter: DeadRecord) -> tuple[bytes, bool]:
    """Return the event as a CloudEvents document, and whether that is the original value."""
    event, value = letter.record.event, letter.record.original.value
    is_document = value is not None and value[:1] == b"{" and value != event.payload
    embeddable = value is not None and value == value.strip() and _is_one_value(value)
    if value is not None and is_document and embeddable and letter.record.cannot_decode is None:
        return value, True
    headers = dict(letter.record.original.headers)
    origin = headers.get("ce_source") or headers.get("ce-source")
    attributes = {
        "specversion": "1.0",
        "id": str(event.id),
        "source": _readable(origin) if origin else letter.record.original.topic,
        "type": event.type,
        "time": moment(event.created_at),
        "subject": event.aggregate_id,
        "partitionkey": event.key,
        "traceparent": event.traceparent,
        "datacontenttype": event.content_type,
    }
    head = _json({name: value for name, value in attributes.items() if value is not None})[:-1]
    if value is None:
        return head + b"}", False
    if embeddable and is_json(event.content_type):
        return head + b',"data":' + value + b"}", False
    return head + b',"data_base64":"' + base64.b64encode(value) + b'"}', False


def _is_one_value(value: bytes) -> bool:
    """Return whether the bytes are one JSON value: nothing, or two values with a comma, would pass inside a margin."""
    return holds_json(value) and holds_json(_MARGIN[0] + value + _MARGIN[1])


def cause_headers(letter: DeadRecord, *, spring: bool, error: bool = True) -> Headers:
    """Return the headers that say why, where and when. ``error``: with the text and the stack trace of the error."""
    original, refusal = letter.record.original, letter.refusal
    lines = refusal.error.strip().splitlines() or [""]
    own: list[tuple[str, bytes]] = [
        (REASON, refusal.reason.encode()),
        ("mailboat-dead-error", bounded_error(lines[-1]).encode() if error else b""),
        ("mailboat-dead-attempts", str(letter.attempts).encode()),
        ("mailboat-dead-first-failed", moment(letter.first_failed).encode()),
        ("mailboat-dead-last-failed", moment(letter.failed_at).encode()),
        (CONSUMER, letter.consumer.encode()),
        (TOPIC, original.topic.encode()),
        *([] if original.partition is None else [(PARTITION, str(original.partition).encode())]),
        (OFFSET, str(original.offset).encode()),
    ]
    return (*own, *_spring_headers(letter, lines, error=error)) if spring else tuple(own)


def _spring_headers(letter: DeadRecord, lines: list[str], *, error: bool) -> Headers:
    """Return the headers of Spring Kafka's DeadLetterPublishingRecoverer, which other tools read too. Numbers are
    big-endian integers, as Java writes them."""
    original = letter.record.original
    found = [
        ("original-topic", original.topic.encode()),
        ("original-partition", (original.partition or 0).to_bytes(4, "big", signed=True)),
        ("original-offset", int(original.offset).to_bytes(8, "big", signed=True)),
    ]
    if original.timestamp is not None:
        milliseconds = int(original.timestamp.timestamp() * 1000)
        found += [
            ("original-timestamp", milliseconds.to_bytes(8, "big", signed=True)),
            ("original-timestamp-type", b"CreateTime"),
        ]
    if letter.group is not None:
        found.append(("original-consumer-group", letter.group.encode()))
    name, message = _exception(lines[-1], letter.refusal.reason)
    found.append(("exception-fqcn", name.encode()))
    if error:
        found.append(("exception-message", bounded_error(message).encode()))
        if len(lines) > 1:
            found.append(("exception-stacktrace", letter.refusal.error[-LONGEST_ERROR:].encode(errors="replace")))
    return tuple((f"{_SPRING}{name}", value) for name, value in found)


def _exception(last_line: str, reason: str) -> tuple[str, str]:
    """Return class and message of the exception in the last line of a traceback; else the reason and the line."""
    name, colon, message = last_line.partition(": ")
    is_class = re.fullmatch(r"[A-Za-z_][\w.]*", name, re.ASCII) is not None
    return (name, message) if is_class and colon else (reason, last_line)


def with_content_type(headers: Headers) -> Headers:
    """Return the headers with the content type of an envelope."""
    return (
        *((name, value) for name, value in headers if name.lower() != "content-type"),
        ("content-type", _CONTENT_TYPE),
    )


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A dead letter as it was read: the original message and the cause."""

    original: Original
    """With the topic, partition and offset of the origin."""
    reason: str
    error: str
    attempts: int
    failed_at: datetime | None
    consumer: str
    truncated: str | None = None

    @property
    def has_value(self) -> bool:
        """False if only the coordinates of the original are left."""
        return self.truncated != WITHOUT_VALUE


def replay_group(consumers_group: str) -> str:
    """Return the consumer group that stores the progress of replays without filters."""
    return f"{consumers_group}.dlq-replay"


def is_dead_letter(headers: Mapping[str, bytes]) -> bool:
    """Return whether the headers are those of a dead letter of a consumer. Relays' dead letters are not."""
    return TOPIC in headers or headers.get("content-type", b"").startswith(_CONTENT_TYPE)


def restored(message: Original) -> Restored:
    """Return the content of a dead letter. Raises NotADeadLetter."""
    headers = dict(message.headers)
    try:
        if headers.get("content-type", b"").startswith(_CONTENT_TYPE):
            return _from_envelope(message)
        return _from_headers(message, headers)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotADeadLetter(f"not a dead letter: {type(error).__name__}") from error


def _from_envelope(message: Original) -> Restored:
    document = members((message.value or b"").decode())
    source, event = document["source"].value, document["originalEvent"].text
    if source.get("structured"):
        value: bytes | None = event.encode()
    else:
        parts = members(event)
        encoded, data = parts.get("data_base64"), parts.get("data")
        value = base64.b64decode(encoded.value) if encoded else None if data is None else data.text.encode()
    timestamp = source.get("timestamp")
    return Restored(
        original=Original(
            topic=source["topic"],
            partition=source["partition"],
            offset=source["offset"],
            timestamp=None if timestamp is None else datetime.fromisoformat(timestamp),
            key=_bytes(source["key"]),
            value=value,
            headers=_header_pairs(source["headers"]),
        ),
        reason=str(document["reason"].value),
        error=str(document["error"].value),
        attempts=int(document["attempts"].value),
        failed_at=datetime.fromisoformat(document["failedAt"].value),
        consumer=str(document["consumer"].value),
    )


def _from_headers(message: Original, headers: Mapping[str, bytes]) -> Restored:
    def text(name: str) -> str:
        return headers.get(name, b"").decode(errors="replace")

    on_kafka = PARTITION in headers
    stamp = headers.get(f"{_SPRING}original-timestamp")
    return Restored(
        original=replace(
            message,
            topic=headers[TOPIC].decode(),
            partition=int(headers[PARTITION]) if on_kafka else None,
            offset=int(headers[OFFSET]) if on_kafka else headers[OFFSET].decode(),
            timestamp=message.timestamp if stamp is None else _from_milliseconds(stamp),
            headers=_original_headers(message.headers, in_order=on_kafka),
        ),
        reason=text(REASON),
        error=text(f"{_SPRING}exception-stacktrace") or text("mailboat-dead-error"),
        attempts=int(text("mailboat-dead-attempts") or 0),
        failed_at=datetime.fromisoformat(text("mailboat-dead-last-failed")),
        consumer=text(CONSUMER),
        truncated=text(TRUNCATED) or None,
    )


def _original_headers(headers: Headers, *, in_order: bool) -> Headers:
    """Return the headers without the added ones. Pub/Sub's attributes have no order, and can't occur twice."""
    if in_order:
        names = [name for name, _ in headers]
        return headers[: len(names) - 1 - names[::-1].index(REASON)]
    return tuple((name, value) for name, value in headers if not name.startswith(_OWN))


def _from_milliseconds(value: bytes) -> datetime:
    return datetime.fromtimestamp(int.from_bytes(value, "big", signed=True) / 1000, UTC)


# -- values ----------------------------------------------------------------------------------------------------------


def moment(time: datetime) -> str:
    """Return RFC 3339 in UTC."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def _readable(value: bytes | None) -> str | dict[str, str] | None:
    """Return text if the bytes are text; else an object with base64."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _bytes(value: str | Mapping[str, str] | None) -> bytes | None:
    if value is None or isinstance(value, str):
        return None if value is None else value.encode()
    return base64.b64decode(value["base64"])


def _header_object(headers: Headers) -> Any:
    """Return an object of the headers; if a name occurs twice, a list of objects with one header each."""
    readable = [(name, _readable(value)) for name, value in headers]
    names = dict(readable)
    return names if len(names) == len(readable) else [{name: value} for name, value in readable]


def _header_pairs(headers: Any) -> Headers:
    objects = [headers] if isinstance(headers, dict) else headers
    return tuple((name, _bytes(value)) for each in objects for name, value in each.items())  # type: ignore[misc]
