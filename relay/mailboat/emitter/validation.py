"""An event before its insertion: its fields and the validation rules of the outbox.

The rules equal those of the SQL function ``mailboat.check_event`` (``migrations/0001_schema/30_emit.sql``), so that an
event refused in one language is refused in all. They are checked before any statement is sent; errors name the invalid
argument. This module does not access a database.
"""

import json
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypedDict

from mailboat.errors import EmitRefused

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
MAX_TYPE_CHARACTERS = 255
MAX_KEY_BYTES = 1024
MAX_HEADERS = 64
MAX_HEADER_BYTES = 4096
MAX_TAGS = 64
MAX_TAG_CHARACTERS = 128
MAX_EXTRA_BYTES = 64 * 1024
"""Limit of headers and tags together: they are read, kept in memory and sent with every event, even a small one."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HEADER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESERVED_HEADER = re.compile(
    r"(mailboat-|ce[_-]).*|(event|aggregate)_(id|type)|created_at|partitionkey|traceparent|content-type", re.IGNORECASE
)
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+ *(;[\x20-\x7e]*)?")
_JSON_TYPE = re.compile(r"[^;]*[/+]json *(;|$)", re.IGNORECASE)
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Payload = Any
"""A value that can be written as JSON, ``str`` (JSON text unless ``content_type`` differs), ``bytes``, or None: a
tombstone. In JSON, UUID, datetime, date, time and Decimal are strings, an Enum is its value, a dataclass or pydantic
model is an object."""

Identity = str | uuid.UUID | int | date | Decimal | Enum
"""What a key or an aggregate id may be; stored as text."""


class EventFields(TypedDict, total=False):
    """The optional arguments of ``emit`` and their types; `NewEvent` has their meaning and their defaults."""

    key: Identity | None
    aggregate_type: str | None
    aggregate_id: Identity | None
    headers: Mapping[str, str] | None
    tags: Iterable[str]
    traceparent: str | None
    event_id: uuid.UUID | None
    content_type: str | None
    ordered: bool


@dataclass(frozen=True, slots=True)
class NewEvent:
    """One event for ``emit_many``; the fields are the arguments of ``emit``."""

    type: str
    payload: Payload = None
    key: Identity | None = None
    """Order is kept per key; default: the ``aggregate_id``."""
    aggregate_type: str | None = None
    aggregate_id: Identity | None = None
    headers: Mapping[str, str] | None = None
    tags: Iterable[str] = ()
    traceparent: str | None = None
    """W3C trace context; default: that of the current OpenTelemetry span, if there is one."""
    event_id: uuid.UUID | None = None
    content_type: str | None = None
    ordered: bool = True
    """False: no order, even with an aggregate."""


class OutboxRow(NamedTuple):
    """A validated event as the columns of an outbox row. Columns other than text or bytea hold their text form."""

    event_id: str
    event_type: str
    aggregate_type: str | None
    aggregate_id: str | None
    key: str | None
    payload: bytes | None
    content_type: str
    headers: str | None
    tags: str
    traceparent: str | None


def checked(event: NewEvent, *, where: str = "") -> OutboxRow:
    """Return the row of an event or raise `EmitRefused`. ``where`` precedes the argument's name in the message."""
    try:
        payload, content_type = _payload(event.payload, event.content_type)
        event_type = _type(event.type)
        aggregate_type, aggregate_id, key = _identity(event)
        headers, tags = _headers(event.headers), _tags(event.tags)
        extra = sum(len(text.encode()) for text in chain.from_iterable((*headers.items(), tags)))
        if extra > MAX_EXTRA_BYTES:
            _refuse("headers", f"and tags have {extra} bytes together, the limit is 64 KiB")
        return OutboxRow(
            event_id=str(_event_id(event.event_id)),
            event_type=event_type,
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            key=(aggregate_id if key is None else key) if event.ordered else None,
            payload=payload,
            content_type=content_type,
            headers=json.dumps(headers, ensure_ascii=False) if headers else None,
            tags=_array(tags),
            traceparent=_traceparent(event.traceparent),
        )
    except EmitRefused as refusal:
        raise EmitRefused(f"emit: {where}{refusal}") from refusal.__cause__


def _refuse(argument: str, problem: str, cause: Exception | None = None) -> NoReturn:
    raise EmitRefused(f"{argument} {problem}") from cause


def _text(argument: str, value: object) -> str:
    """Return a string that Postgres can store, UTF-8 without NUL, or raise."""
    if isinstance(value, Enum):
        value = value.value  # psycopg would store the name of a ``StrEnum``
    if not isinstance(value, str):
        _refuse(argument, f"must be a string, not {type(value).__name__}")
    if "\0" in value:
        _refuse(argument, "must not contain NUL characters")
    _utf8(argument, value)
    return str(value)


def _utf8(argument: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        _refuse(argument, "must be valid Unicode: it has half of a surrogate pair", error)


def _type(value: object) -> str:
    text = _text("type", value)
    if not text:
        _refuse("type", "must not be empty")
    if len(text) > MAX_TYPE_CHARACTERS:
        _refuse("type", f"has {len(text)} characters, the limit is {MAX_TYPE_CHARACTERS}")
    if _CONTROL.search(text):
        _refuse("type", "must not contain control characters")
    return text


def _identity(event: NewEvent) -> tuple[str | None, str | None, str | None]:
    """Return aggregate type, aggregate id and key as text, or raise."""
    aggregate_type = aggregate_id = key = None
    if event.aggregate_type is not None:
        aggregate_type = _text("aggregate_type", event.aggregate_type)
        if not 0 < len(aggregate_type) <= MAX_TYPE_CHARACTERS or _CONTROL.search(aggregate_type):
            _refuse("aggregate_type", f"must have 1 to {MAX_TYPE_CHARACTERS} characters and no control characters")
    if event.aggregate_id is not None:
        aggregate_id = _text("aggregate_id", _plain_identity(event.aggregate_id))
        if not 0 < len(aggregate_id.encode()) <= MAX_KEY_BYTES:
            _refuse("aggregate_id", f"must have 1 to {MAX_KEY_BYTES} bytes")
    if event.key is not None:
        key = _text("key", _plain_identity(event.key))
        if not key:
            _refuse("key", "must not be empty: leave it out to keep the order of aggregate_id, or say ordered=False")
        if len(key.encode()) > MAX_KEY_BYTES:
            _refuse("key", f"has {len(key.encode())} bytes, the limit is {MAX_KEY_BYTES}")
        if not event.ordered:
            _refuse("key", "and ordered=False contradict each other")
    return aggregate_type, aggregate_id, key


def _plain_identity(value: object) -> object:
    """Return the text of an id that applications have as another type; other values unchanged."""
    if isinstance(value, Enum):
        return _plain_identity(value.value)
    if isinstance(value, uuid.UUID | int | Decimal) and not isinstance(value, bool):
        return str(value)
    return _iso(value) if isinstance(value, date) else value


def _iso(value: date | time) -> str:
    """Return ISO 8601, with Z for UTC as pydantic and RFC 3339 write it."""
    return value.isoformat().replace("+00:00", "Z")


def _event_id(value: object) -> uuid.UUID:
    if value is None:
        return uuid.uuid4()
    if isinstance(value, uuid.UUID):
        return value
    if not isinstance(value, str):
        _refuse("event_id", f"must be a UUID, not {type(value).__name__}")
    try:
        return uuid.UUID(value)
    except ValueError as error:
        _refuse("event_id", "must be a UUID", error)


def _payload(value: Any, content_type: str | None) -> tuple[bytes | None, str]:
    is_binary = isinstance(value, bytes | bytearray | memoryview)
    is_text = isinstance(value, str) and not isinstance(value, Enum)
    if content_type is None:
        content_type = "application/octet-stream" if is_binary else "application/json"
    elif len(_text("content_type", content_type)) > 255 or not _MEDIA_TYPE.fullmatch(content_type):
        _refuse("content_type", "must be a media type such as application/json")
    if value is None:
        return None, content_type
    if is_binary:
        data = bytes(value)
    elif is_text:
        data = _utf8("payload", value)
    else:
        data = _json(value)
    if len(data) > MAX_PAYLOAD_BYTES:
        _refuse("payload", f"has {len(data)} bytes, the limit is 16 MiB: send a reference to it instead")
    if is_text and _JSON_TYPE.match(content_type):
        _require_json(value)
    return data, content_type


def _json(value: object) -> bytes:
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_jsonable)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse("payload", f"can't be written as JSON: {error}", error)
    return _utf8("payload", text)


def _jsonable(value: object) -> object:
    """Return the JSON form of a value that ``json`` does not know. Decimals become strings: no reader rounds those."""
    match value:
        case Enum():
            return value.value
        case uuid.UUID() | Decimal():
            return str(value)
        case date() | time():
            return _iso(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if (dump := getattr(value, "model_dump", None)) is not None and not isinstance(value, type):
        return dump(mode="json", by_alias=True)  # pydantic, which applications that only emit may not have
    raise TypeError(f"{type(value).__qualname__} has no JSON form: convert it to a dict, list, str or number first")


def _require_json(value: str) -> None:
    try:
        json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse("payload", "is not JSON: say content_type='text/plain' for other text", error)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _headers(headers: object) -> dict[str, str]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        _refuse("headers", "must be a mapping of strings")
    if len(headers) > MAX_HEADERS:
        _refuse("headers", f"must be {MAX_HEADERS} at most")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            _refuse("headers", f"contain the name {str(name)[:128]!a}: use 1 to 128 of A-Z a-z 0-9 . _ -")
        if _RESERVED_HEADER.fullmatch(name):
            _refuse("headers", f"contain the name {name}, which Mailboat sets itself")
        text = _text(f"headers.{name}", value)
        if len(text.encode()) > MAX_HEADER_BYTES:
            _refuse(f"headers.{name}", f"has more than {MAX_HEADER_BYTES} bytes")
        if _CONTROL.search(text):
            _refuse(f"headers.{name}", "must not contain control characters")
    return dict(headers)


def _tags(tags: object) -> list[str]:
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        _refuse("tags", "must be a list of strings")
    texts = [_text("tags", tag) for tag in tags]
    if len(texts) > MAX_TAGS:
        _refuse("tags", f"must be {MAX_TAGS} at most")
    if any(not 0 < len(text) <= MAX_TAG_CHARACTERS or _CONTROL.search(text) for text in texts):
        _refuse("tags", f"must each have 1 to {MAX_TAG_CHARACTERS} characters and no control characters")
    return texts


def _array(texts: Iterable[str]) -> str:
    """Return the text of a Postgres array."""
    return "{" + ",".join('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts) + "}"


def _traceparent(value: object) -> str | None:
    if value is None:
        return _current_traceparent()
    if not _TRACEPARENT.fullmatch(_text("traceparent", value)):
        _refuse("traceparent", "must be a W3C trace context: 00-<32 hex digits>-<16 hex digits>-<2 hex digits>")
    return str(value)


def _current_traceparent() -> str | None:
    """Return the trace context of the current OpenTelemetry span, if the application uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")  # not imported here: without it there is no span
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}" if context.is_valid else None
