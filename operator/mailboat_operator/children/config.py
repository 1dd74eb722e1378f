"""The ConfigMap: the relay's whole configuration, which is the resources themselves, and the operator's public keys.

It carries a version that rises with every change, so that a relay can tell what is newer whichever way it came (the
mounted file or a push). Content that is the same but for the version is no change, and keeps its version.

The text is a List in JSON, with one resource per line: the relay, then its subscriptions by name. Each subscription is
written once per version of its resource (``Item``), and the operator reads single lines: the version, and the last
valid form of a subscription whose resource can't be used any more. A large text is compressed
(``mailboat_spec.packing``); then it stands in ``binaryData``.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from mailboat_operator.children.ownership import child_metadata
from mailboat_operator.podspec import KEYS_KEY, RESOURCES_KEY, child_name
from mailboat_spec import EventSubscription, OutboxRelay, Resource, State
from mailboat_spec.names import CONFIG_VERSION_ANNOTATION, SUBSCRIPTION_KIND
from mailboat_spec.packing import LARGEST_TEXT, is_packed, pack, unpack

_HEAD: Final = '{"apiVersion":"v1","kind":"List","items":[\n'
_TAIL: Final = "\n]}\n"
_BETWEEN: Final = ",\n"
_LONGEST_LINE: Final = 3 * 512 * 1024
"""Characters: etcd stores no larger resource."""
_LARGEST_PACKED: Final = 960 * 1024
"""Bytes. A ConfigMap holds 1 MiB, and the public keys need some of it."""
_NEWEST: Final = 2**62
"""Versions are below it: relays take none that is much higher, and there must be room for the next ones."""
_BELIEVABLE_AHEAD: Final = 24 * 3600 * 1000
"""Milliseconds: no two clocks of a cluster differ by more than a day."""


@dataclass(frozen=True)
class Configuration:
    """What relays are told, and its version."""

    version: int
    text: str

    @cached_property
    def packed(self) -> bytes:
        """As it is stored and sent. Takes a while for a large one, the first time."""
        return pack(self.text)


class Item(NamedTuple):
    """One subscription in a configuration: the name by which it is sorted, and its line."""

    name: str
    line: str


def item(subscription: EventSubscription) -> Item:
    return item_as_known(_document(subscription))


def item_as_known(form: Mapping[str, Any]) -> Item:
    """A subscription as relays know it already, which stays as it is, whether it can be read here or not."""
    return Item(str(form["metadata"]["name"]), _line(form))


def config_map(relay: OutboxRelay, configuration: Configuration, public_keys: str) -> dict[str, Any]:
    """The whole object."""
    made: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(relay),
        "data": {KEYS_KEY: public_keys},
    }
    if is_packed(configuration.packed):
        made["binaryData"] = {RESOURCES_KEY: base64.b64encode(configuration.packed).decode()}
    else:
        made["data"][RESOURCES_KEY] = configuration.text
    return made


def too_large(configuration: Configuration, relay: str) -> str:
    """Why the configuration can't be stored, as a sentence; empty if it can."""
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
    """The present one if nothing changed; else one with a version above every earlier one.

    The clock gives the version, so that it rises even where the ConfigMap was deleted and nothing is remembered.
    ``in_use`` is the highest version that relays report: they pass over everything that is older. A report from the
    far future is not believed.
    """
    lines = [each.line for each in sorted(items)]
    in_use = in_use if in_use < now_ms + _BELIEVABLE_AHEAD else 0
    if before is not None and before.version >= in_use and before.text == _text(relay, lines, before.version):
        return before
    version = max(before.version + 1 if before is not None else 0, in_use + 1, now_ms)
    return Configuration(version, _text(relay, lines, version))


def all_paused(before: Configuration, now_ms: int) -> Configuration:
    """The same with every subscription paused; the very same where all are.

    Not one without subscriptions: relays would forget how far each had come.
    """
    first, *lines = _lines(before.text)
    paused = [_paused(line) for line in lines]
    if paused == lines:
        return before
    version = max(before.version + 1, now_ms)
    relay = json.loads(first)
    relay["metadata"]["annotations"] = {CONFIG_VERSION_ANNOTATION: str(version)}
    return Configuration(version, _joined([_line(relay), *paused]))


def _paused(line: str) -> str:
    document = _parsed(line)
    if document.get("kind") != SUBSCRIPTION_KIND or not isinstance(document.get("spec"), dict):
        return line
    if document["spec"].get("state") == State.PAUSED:
        return line
    document["spec"]["state"] = State.PAUSED.value
    return _line(document)


def configuration_in(config_map: Mapping[str, Any] | None) -> Configuration | None:
    """What a ConfigMap says, or None where it says nothing that the operator has written.

    Nor is a version understood that relays refuse: if it were kept, so would be the text that has it.
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
    """A subscription as relays know it, for when its resource can't be used any more."""
    for document in _subscriptions_with(configuration, "uid", uid):
        if _metadata(document).get("uid") == uid:
            return document
    return None


def knows_by_name(configuration: Configuration | None, namespace: str, name: str) -> bool:
    """Whether a subscription of this name is in it, this one or one that had the name before."""
    return any(is_named(document, namespace, name) for document in _subscriptions_with(configuration, "name", name))


def is_named(document: Mapping[str, Any], namespace: str, name: str) -> bool:
    metadata = _metadata(document)
    return (metadata.get("namespace"), metadata.get("name")) == (namespace, name)


def _metadata(document: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = document.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _subscriptions_with(configuration: Configuration | None, field: str, value: str) -> Iterator[dict[str, Any]]:
    """Those on whose line a field has this value. Finding a line is fast; no other one is parsed."""
    text = configuration.text if configuration is not None else ""
    wanted, at = f"{_line(field)}:{_line(value)}", 0
    while (at := text.find(wanted, at)) >= 0:
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        end = end if end >= 0 else len(text)
        document = _parsed(text[start:end].removesuffix(","))
        if document.get("kind") == SUBSCRIPTION_KIND:
            yield document
        at = end


def _lines(text: str) -> list[str]:
    return text.removeprefix(_HEAD).removesuffix(_TAIL).split(_BETWEEN)


def _parsed(line: str) -> dict[str, Any]:
    """One resource; empty where the line is none. Anybody may have written it: it may be large, or nested deep."""
    try:
        document = json.loads(line) if len(line) <= _LONGEST_LINE else None
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(relay: OutboxRelay, lines: list[str], version: int) -> str:
    first = _document(relay)
    first["metadata"]["annotations"] = {CONFIG_VERSION_ANNOTATION: str(version)}
    return _joined([_line(first), *lines])


def _joined(lines: list[str]) -> str:
    return f"{_HEAD}{_BETWEEN.join(lines)}{_TAIL}"


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _document(resource: Resource) -> dict[str, Any]:
    """Who it is and what it should be; nothing of what others noted on it, so that a label changes no configuration.

    Without what is as it is by default. Relays refuse fields that they do not know, and sidecars stay as old as their
    pods: a field that a later version adds must not reach them before somebody uses it.
    """
    differing = resource.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    manifest = resource.manifest()
    wanted = ("name", "namespace", "uid", "generation")
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {field: manifest["metadata"][field] for field in wanted if field in manifest["metadata"]},
        "spec": differing["spec"],
    }
