"""ConfigMap of a relay: its complete configuration, which is the resources themselves, and the operator's public keys.

The configuration has a version that increases with every change, so that a relay can determine the newer one of the
mounted file and a push. Content that differs only in the version is unchanged, and keeps its version.

The text is a List in JSON, with one resource per line: the relay, then its subscriptions by name. So the operator can
parse single lines: the version, and the last valid form of a subscription whose resource became invalid. A large text
is compressed (``mailboat_spec.wire_format``) and stored in ``binaryData``.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from mailboat_operator.resources.pod import KEYS_KEY, RESOURCES_KEY, child_name, mapping
from mailboat_spec import EventSubscription, OutboxRelay, State
from mailboat_spec.names import CONFIG_VERSION_ANNOTATION, SUBSCRIPTION_KIND
from mailboat_spec.wire_format import LARGEST_TEXT, is_packed, pack, unpack

_HEAD: Final = '{"apiVersion":"v1","kind":"List","items":[\n'
_TAIL: Final = "\n]}\n"
_BETWEEN: Final = ",\n"
_LONGEST_LINE: Final = 3 * 512 * 1024
"""Characters: etcd stores no larger resource."""
_LARGEST_PACKED: Final = 960 * 1024
"""Bytes. A ConfigMap holds 1 MiB, and the public keys need part of it."""
_NEWEST: Final = 2**62
"""Upper bound of versions. Relays reject much higher ones, and there must be room for the next versions."""
_MAX_CLOCK_SKEW: Final = 24 * 3600 * 1000
"""Milliseconds. Clocks of a cluster are assumed to differ by less than a day."""


@dataclass(frozen=True)
class Configuration:
    version: int
    text: str

    @cached_property
    def packed(self) -> bytes:
        """Stored and sent form, cached. The first call takes a while for a large configuration."""
        return pack(self.text)


class Item(NamedTuple):
    """One subscription in a configuration: its name, which is the sort key, and its line."""

    name: str
    line: str


def item(subscription: EventSubscription) -> Item:
    return raw_item(_document(subscription))


def raw_item(form: Mapping[str, Any]) -> Item:
    """Return the item of a subscription as relays have it, unchanged, whether the operator can parse it or not."""
    return Item(str(form["metadata"]["name"]), _line(form))


def config_map_content(configuration: Configuration, public_keys: str) -> dict[str, dict[str, str]]:
    if is_packed(configuration.packed):
        packed = base64.b64encode(configuration.packed).decode()
        return {"data": {KEYS_KEY: public_keys}, "binaryData": {RESOURCES_KEY: packed}}
    return {"data": {KEYS_KEY: public_keys, RESOURCES_KEY: configuration.text}}


def too_large(configuration: Configuration, relay: str) -> str:
    """Return a message with the reason why the configuration can't be stored; empty if it can."""
    text, packed = len(configuration.text), len(configuration.packed)
    if text <= LARGEST_TEXT and packed <= _LARGEST_PACKED:
        return ""
    return (
        f"Relays get no new configuration, not even a pause: with all subscriptions it has {text // 1024} KiB, "
        f"{packed // 1024} KiB compressed, and {LARGEST_TEXT // 1024} and {_LARGEST_PACKED // 1024} KiB are possible "
        f'in the ConfigMap "{child_name(relay)}". Delete subscriptions, or give some of them an OutboxRelay of '
        "their own."
    )


def next_configuration(
    relay: OutboxRelay, items: Iterable[Item], before: Configuration | None, now_ms: int, in_use: int = 0
) -> Configuration:
    """Return the current configuration if nothing changed; else one with a version above every earlier one.

    The version is derived from the clock, so that it increases even if the ConfigMap was deleted and no state is left.
    ``in_use`` is the highest version that relays report: they ignore every older one. A reported version from the far
    future is ignored.
    """
    lines = [each.line for each in sorted(items)]
    in_use = in_use if in_use < now_ms + _MAX_CLOCK_SKEW else 0
    document = _document(relay)
    if before is not None and before.version >= in_use and before == _versioned(document, lines, before.version):
        return before
    return _versioned(document, lines, max(before.version + 1 if before is not None else 0, in_use + 1, now_ms))


def all_paused(before: Configuration, now_ms: int) -> Configuration:
    """Return the configuration with every subscription paused; the same object if all are.

    Removing the subscriptions instead would make relays drop their progress.
    """
    first, *lines = _lines(before.text)
    paused = [_paused(line) for line in lines]
    if paused == lines:
        return before
    return _versioned(json.loads(first), paused, max(before.version + 1, now_ms))


def _paused(line: str) -> str:
    document = _parsed(line)
    spec = document.get("spec")
    if document.get("kind") != SUBSCRIPTION_KIND or not isinstance(spec, dict) or spec.get("state") == State.PAUSED:
        return line
    return _line({**document, "spec": {**spec, "state": State.PAUSED.value}})


def configuration_in(config_map: Mapping[str, Any] | None) -> Configuration | None:
    """Parse the configuration in a ConfigMap; None if the operator did not write it.

    A version that relays refuse is rejected as well: otherwise both the version and its text would be kept.
    """
    text = _text_in(config_map or {})
    if text is None or not (text.startswith(_HEAD) and text.endswith(_TAIL)):
        return None
    try:
        version = _parsed(_lines(text)[0])["metadata"]["annotations"][CONFIG_VERSION_ANNOTATION]
    except (KeyError, TypeError):
        return None
    if not (isinstance(version, str) and version.isascii() and version.isdigit() and len(version) < 20):
        return None
    return Configuration(int(version), text) if 0 < int(version) < _NEWEST else None


def _text_in(config_map: Mapping[str, Any]) -> str | None:
    text = (config_map.get("data") or {}).get(RESOURCES_KEY)
    if text is not None:
        return text if isinstance(text, str) else None
    try:
        return unpack(base64.b64decode((config_map.get("binaryData") or {}).get(RESOURCES_KEY) or "")).decode()
    except (ValueError, TypeError, binascii.Error):
        return None


def last_valid_form(configuration: Configuration | None, uid: str) -> dict[str, Any] | None:
    """Return a subscription as relays have it, for the case that its resource became invalid."""
    documents = _subscriptions_with(configuration, "uid", uid)
    return next((each for each in documents if mapping(each.get("metadata")).get("uid") == uid), None)


def contains_name(configuration: Configuration | None, namespace: str, name: str) -> bool:
    """Return whether the configuration contains a subscription of this name, this one or a predecessor."""
    return any(is_named(document, namespace, name) for document in _subscriptions_with(configuration, "name", name))


def is_named(document: Mapping[str, Any], namespace: str, name: str) -> bool:
    metadata = mapping(document.get("metadata"))
    return (metadata.get("namespace"), metadata.get("name")) == (namespace, name)


def _subscriptions_with(configuration: Configuration | None, field: str, value: str) -> Iterator[dict[str, Any]]:
    """Yield the subscriptions on whose line a field has this value. Finding a line is fast; no other line is parsed."""
    text = configuration.text if configuration is not None else ""
    needle, at = f"{_line(field)}:{_line(value)}", 0
    while (at := text.find(needle, at)) >= 0:
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        end = end if end >= 0 else len(text)
        document = _parsed(text[start:end].removesuffix(","))
        if document.get("kind") == SUBSCRIPTION_KIND:
            yield document
        at = end


def _lines(text: str) -> list[str]:
    return text.removeprefix(_HEAD).removesuffix(_TAIL).split(_BETWEEN)


def _parsed(line: str) -> dict[str, Any]:
    """Parse one resource; empty if the line is invalid. Anyone may have written it, so bound its size and nesting."""
    try:
        document = json.loads(line) if len(line) <= _LONGEST_LINE else None
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _versioned(relay: dict[str, Any], lines: list[str], version: int) -> Configuration:
    relay["metadata"]["annotations"] = {CONFIG_VERSION_ANNOTATION: str(version)}
    return Configuration(version, f"{_HEAD}{_BETWEEN.join([_line(relay), *lines])}{_TAIL}")


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _document(resource: OutboxRelay | EventSubscription) -> dict[str, Any]:
    """Return identity and spec, without other metadata, so that a label changes no configuration.

    Default values are omitted: relays refuse unknown fields, and a field added by a later version must not reach the
    sidecars of running pods before it is used.
    """
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": resource.metadata.model_dump(include={"name", "namespace", "uid", "generation"}),
        "spec": resource.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True),
    }
