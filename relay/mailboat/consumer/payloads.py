"""Decoders from payload bytes to a handler's annotation: pydantic models, dataclasses, dict, str, bytes, any JSON."""

import json
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from mailboat.consumer.handler_outcomes import CannotDecode
from mailboat.consumer.received_event import Event

Decode = Callable[[Event], Any]


def decoder(annotation: Any) -> Decode:
    """Return the decoder for an annotation. Raises pydantic's error for a type that pydantic does not support."""
    accepts_none = annotation is Any or NoneType in _alternatives(annotation)
    types = [each for each in _alternatives(annotation) if each is not NoneType]
    plain = types[0] if len(types) == 1 else None
    if plain is bytes:
        parse: Callable[[bytes], Any] = bytes
    elif plain is str:
        parse = _text
    elif plain in (Any, dict, list, object):
        parse = json.loads
    else:
        parse = TypeAdapter(annotation).validate_json

    def decode(event: Event) -> Any:
        if event.payload is None:
            if accepts_none:
                return None
            raise CannotDecode(f"event {event.id} is a tombstone: annotate the payload with `| None` to handle those")
        try:
            return parse(event.payload)
        except ValidationError as error:
            raise CannotDecode(_in_short(error)) from None
        except (ValueError, UnicodeDecodeError) as error:
            raise CannotDecode(f"not JSON: {type(error).__name__}") from None

    return decode


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _text(payload: bytes) -> str:
    return payload.decode()


def _in_short(error: ValidationError) -> str:
    """Return fields and errors without the values, which may be personal data."""
    found = (f"{'.'.join(map(str, each['loc'])) or 'payload'}: {each['msg']}" for each in error.errors()[:10])
    return f"{error.title}: {'; '.join(found)}"
