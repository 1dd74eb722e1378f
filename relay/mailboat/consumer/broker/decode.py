"""From a broker's message to an event.

Formats: everything that relays write (CloudEvents in binary mode, CloudEvents as one JSON document, columns of the
outbox as headers, raw), messages of Debezium's outbox router, and messages of other producers. Decoding never fails: a
message that is not an event becomes a record with ``cannot_decode``, and the engine makes it a dead letter.

The id decides about duplicates, so it is the same at each delivery: the UUID of the message if it has one; else made
from the producer's id; else from topic, partition and offset.

Cost matters: a consumer decodes each message, and most messages are in binary mode. That path touches each header once.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import NAMESPACE_URL, UUID, SafeUUID, uuid5

from mailboat.consumer.broker.envelope import NotADeadLetter, is_dead_letter, restored
from mailboat.consumer.broker.interfaces import Original, Record
from mailboat.consumer.broker.json_members import attributes_and_data
from mailboat.consumer.received_event import Event, EventDraft

LONGEST_ATTRIBUTE: Final = 4096
"""Maximum bytes of an id or a type. They are used in keys, metrics and logs."""

_SHORT: Final = 256
_MOST_TEXTS: Final = 10_000
"""Bounds of the texts that are kept: values of other producers may all differ."""

_IDS: Final = uuid5(NAMESPACE_URL, "https://mailboat.dev/ids")
_new_uuid, _set = UUID.__new__, object.__setattr__
_UNKNOWN_SAFETY: Final = SafeUUID.unknown  # bound once: looking up a member of an enum is slow
_UUID_LENGTH: Final = 36
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_JSON: Final = "application/json"
_STRUCTURED: Final = "application/cloudevents"
_BATCH: Final = "application/cloudevents-batch"
_OWN: Final = "mailboat-"


class _Names:
    """Names of the CloudEvents headers: ``ce_`` on Kafka, ``ce-`` on Pub/Sub."""

    def __init__(self, prefix: str) -> None:
        self.id, self.type, self.time = f"{prefix}id", f"{prefix}type", f"{prefix}time"
        self.source, self.subject = f"{prefix}source", f"{prefix}subject"
        self.aggregatetype, self.partitionkey = f"{prefix}aggregatetype", f"{prefix}partitionkey"
        self.traceparent, self.datacontenttype = f"{prefix}traceparent", f"{prefix}datacontenttype"
        self.consumed = frozenset({
            f"{prefix}specversion", self.id, self.type, self.time, self.subject, self.aggregatetype, self.partitionkey,
            self.traceparent, self.datacontenttype, "event_id", "event_type", "created_at", "aggregate_id",
            "aggregate_type", "traceparent", "content-type", "mailboat-sequence", "mailboat-partition",
            "mailboat-generation", "mailboat-attempt",
        })  # fmt: skip
        """Headers that become fields of the event, or that only describe the transport."""


_KAFKA: Final = _Names("ce_")
_PUBSUB: Final = _Names("ce-")


class _Unreadable(Exception):
    """The message is not an event. The text says why and contains no data of the message."""


class _Texts(dict[bytes, str]):
    """Texts of header values that repeat, such as types: decoded once, and the same object each time."""

    def __missing__(self, value: bytes) -> str:
        text = value.decode()
        if len(value) <= _SHORT and len(self) < _MOST_TEXTS:
            self[value] = text
        return text


_texts: Final = _Texts()


def decode(original: Original) -> Record:
    """Return the record of a message."""
    headers = dict(original.headers)
    try:
        if is_dead_letter(headers):
            return _copied(original, headers)
        return _decoded(original, headers)
    except _Unreadable as error:
        reason = str(error)
    except UnicodeDecodeError:
        reason = "a header that describes the event is not UTF-8"
    return Record(
        event=_placeholder(original, headers),
        original=original,
        partition=original.partition or 0,
        cannot_decode=reason,
    )


def _decoded(original: Original, headers: dict[str, bytes]) -> Record:
    # Hot path: fallbacks for other producers are looked up only if the message has no CloudEvents id.
    get = headers.get
    partition = original.partition
    names = _PUBSUB if partition is None else _KAFKA
    content_type = get("content-type")
    id_, type_, time = get(names.id), get(names.type), get(names.time)
    subject, aggregate_type, traceparent = get(names.subject), get(names.aggregatetype), get(names.traceparent)
    if id_ is None or type_ is None:
        id_, type_ = id_ or get("event_id"), type_ or get("event_type") or get("eventType")
        time = time or get("created_at")
        subject, traceparent = subject or get("aggregate_id"), traceparent or get("traceparent")
        content_type = content_type or get("Content-Type") or get("contentType")
    if content_type is None:
        content_type = get(names.datacontenttype)
    media_type = _JSON if content_type is None else _texts[content_type]
    value = original.value
    if media_type.startswith(_STRUCTURED):
        if value:
            return _structured(original, headers, media_type, value)
        media_type = _JSON  # a tombstone has no document
    if aggregate_type is None:
        aggregate_type = get("aggregate_type")
    if not value and partition is None:
        value = None  # Pub/Sub has no other tombstone
    key = original.key or get(names.partitionkey)
    replay, replay_for = _replay(headers) if "mailboat-replay" in headers else (False, None)
    event: Event = EventDraft(  # type: ignore[assignment]
        _id(original, id_, headers, names),
        _topic_name(original) if type_ is None else _type(type_),
        None if key is None else _lenient(key),
        value,
        media_type,
        _application_headers(headers, names),
        None if aggregate_type is None else _texts[aggregate_type],
        None if subject is None else subject.decode(),
        None if traceparent is None else traceparent.decode(),
        _time(original, time),
        replay,
        _position(original),
        partition or 0,
    )
    return Record(event=event, original=original, partition=partition or 0, replay_for=replay_for)


# -- dead letters ----------------------------------------------------------------------------------------------------


def _copied(original: Original, headers: dict[str, bytes]) -> Record:
    """Return the original of a dead letter that a tool copied to the topic of origin, as a replay for its consumer.

    On another topic, for example the dead-letter topic itself, a dead letter is an event like any other. Pub/Sub does
    not tell a subscriber the topic, so that there each dead letter counts as copied back.
    """
    try:
        letter = restored(original)
    except NotADeadLetter as error:
        raise _Unreadable(str(error)) from None
    if original.partition is not None and letter.original.topic != original.topic:
        return _decoded(original, headers)
    if not letter.has_value:
        raise _Unreadable("it is a copied dead letter without the original value, which was too large")
    record = decode(letter.original)  # the id of a message without one is made from the place of origin
    partition = original.partition or 0
    event = replace(record.event, replay=True, position=_position(original), partition=partition)
    copied = replace(original, key=letter.original.key, value=letter.original.value, headers=letter.original.headers)
    return replace(record, event=event, original=copied, partition=partition, replay_for=letter.consumer)


# -- one document ----------------------------------------------------------------------------------------------------

_ATTRIBUTES: Final = frozenset(
    {"specversion", "id", "source", "type", "time", "subject", "partitionkey", "datacontenttype", "aggregatetype",
     "traceparent", "data", "data_base64"}
)  # fmt: skip


def _structured(original: Original, headers: dict[str, bytes], media_type: str, value: bytes) -> Record:
    if media_type.startswith(_BATCH):
        raise _Unreadable("it is a batch of CloudEvents; publish one event per message")
    if "+json" not in media_type:
        raise _Unreadable("it is a CloudEvent in another format than JSON")
    try:
        document, data = attributes_and_data(value.decode())
        if b"\\u" in value:
            for each in document.values():
                each.encode() if isinstance(each, str) else None  # half of a surrogate pair
    except UnicodeError:
        raise _Unreadable("the CloudEvents document is not UTF-8") from None
    except ValueError as error:
        raise _Unreadable(f"the CloudEvents document is not valid JSON: {error}") from None

    def text(name: str) -> str | None:
        found = document.get(name)
        if found is not None and not isinstance(found, str):
            raise _Unreadable(f"attribute {name} of the CloudEvents document is not a string")
        return found

    id_, type_, source = text("id"), text("type"), text("source")
    if not id_ or not type_:
        raise _Unreadable("the CloudEvents document has no id or no type")
    content_type = text("datacontenttype") or _JSON
    key, time, traceparent = text("partitionkey"), text("time"), text("traceparent") or _text(headers, "traceparent")
    replay, replay_for = _replay(headers)
    partition = original.partition or 0
    names = _KAFKA if original.partition is not None else _PUBSUB
    event = Event(
        id=_producers_id(_within("id", id_), source or ""),
        type=_within("type", type_),
        key=_lenient(original.key) if original.key else key,
        payload=_data(document, data, content_type),
        content_type=content_type,
        headers=_application_headers(headers, names) | _extensions(document, source),
        aggregate_type=text("aggregatetype") or _text(headers, "aggregate_type"),
        aggregate_id=text("subject"),
        traceparent=traceparent,
        created_at=_time(original, None if time is None else time.encode()),
        replay=replay,
        position=_position(original),
        partition=partition,
    )
    return Record(event=event, original=original, partition=partition, replay_for=replay_for)


def _data(document: Mapping[str, Any], data: str | None, content_type: str) -> bytes | None:
    encoded, value = document.get("data_base64"), document.get("data")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (TypeError, ValueError):
            raise _Unreadable("data_base64 of the CloudEvents document is not base64") from None
    if data is None:
        return None
    if isinstance(value, str) and "json" not in content_type.lower():
        return value.encode()
    return data.encode()


def _extensions(document: Mapping[str, Any], source: str | None) -> dict[str, str]:
    """Return the attributes that Mailboat has no field for, as headers."""
    found = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in document.items()
        if name not in _ATTRIBUTES
    }
    if source is not None and not source.startswith("mailboat/"):
        found["source"] = source
    return found


# -- parts of both ---------------------------------------------------------------------------------------------------


def _application_headers(headers: dict[str, bytes], names: _Names) -> dict[str, str]:
    others = headers.keys() - names.consumed
    found = {}
    for name in headers if others else ():
        if name not in others or name.startswith(_OWN):
            continue
        value = headers[name]
        if name != names.source or not value.startswith(b"mailboat/"):
            found[name] = _lenient(value)
    return found


def _replay(headers: Mapping[str, bytes]) -> tuple[bool, str | None]:
    if headers.get("mailboat-replay") != b"true":
        return False, None
    return True, _text(headers, "mailboat-replay-for")


def _id(original: Original, own: bytes | None, headers: Mapping[str, bytes], names: _Names) -> UUID:
    if own is not None and len(own) == _UUID_LENGTH:
        try:
            return _uuid(own.decode())
        except ValueError:
            pass
    text = own if own is not None else headers.get("eventId") or headers.get("id")
    if not text:
        text = headers.get("mailboat-replay-id", b"")
    if not text:
        return _derived_id(original)
    source = headers.get(names.source, b"").decode() if own is not None else ""
    return _producers_id(_within("id", text.decode()), source)


def _type(value: bytes) -> str:
    return _texts[value] if len(value) <= LONGEST_ATTRIBUTE else _within("type", value.decode())


def _producers_id(text: str, source: str) -> UUID:
    """Return the id as a UUID. An id in another notation is unique per CloudEvents source."""
    try:
        return _uuid(text) if len(text) == _UUID_LENGTH else UUID(text)
    except ValueError:
        return uuid5(_IDS, f"{source}\n{text}")


def _uuid(text: str) -> UUID:
    """Return ``UUID(text)`` at a third of its cost, which would be a quarter of decoding."""
    digits = text.replace("-", "")
    if len(digits) != 32:
        raise ValueError("not a UUID")
    made = _new_uuid(UUID)
    _set(made, "int", int(digits, 16))
    _set(made, "is_safe", _UNKNOWN_SAFETY)
    return made


def _derived_id(original: Original) -> UUID:
    return uuid5(_IDS, f"{original.topic}\n{original.partition}\n{original.offset}")


def _position(original: Original) -> int:
    return original.offset if isinstance(original.offset, int) else 0


def _topic_name(original: Original) -> str:
    """Return the type of an event without one: the topic, or the subscription without its path."""
    return original.topic.rpartition("/")[2]


def _time(original: Original, text: bytes | None) -> datetime:
    if text is not None:
        try:
            time = datetime.fromisoformat(text.decode())
        except ValueError:  # of another producer
            pass
        else:
            return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return original.timestamp or _EPOCH


def _text(headers: Mapping[str, bytes], name: str) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode()


def _lenient(value: bytes) -> str:
    """Return keys and headers of other producers, which may be binary, as text."""
    return value.decode(errors="backslashreplace")


def _within(name: str, text: str) -> str:
    if len(text) > LONGEST_ATTRIBUTE:
        raise _Unreadable(f"its {name} has {len(text)} characters, and may have {LONGEST_ATTRIBUTE}")
    return text


def _placeholder(original: Original, headers: Mapping[str, bytes]) -> Event:
    return Event(
        id=_derived_id(original),
        type=_topic_name(original),
        key=_lenient(original.key) if original.key else None,
        payload=original.value,
        content_type="application/octet-stream",
        created_at=original.timestamp or _EPOCH,
        replay=headers.get("mailboat-replay") == b"true",
        position=_position(original),
        partition=original.partition or 0,
    )
