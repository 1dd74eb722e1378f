"""The ConfigMap: the relay's whole configuration, which is the resources themselves, and the operator's public keys.

It carries a version that rises with every change, so that a relay can tell what is newer whichever way it came (the
mounted file or a push). Content that is the same but for the version is no change, and keeps its version.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import yaml

from mailboat_operator.children.ownership import child_metadata
from mailboat_operator.podspec import KEYS_KEY, RESOURCES_KEY
from mailboat_spec import EventSubscription, OutboxRelay, Resource, State
from mailboat_spec.names import CONFIG_VERSION_ANNOTATION, SUBSCRIPTION_KIND

_WITHOUT_ALIASES: Final = {"ignore_aliases": lambda *_: True}
_DUMPER: Final = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), _WITHOUT_ALIASES)
"""Writes no alias, since none is read."""
_DEEPEST: Final = 270
"""Levels of nesting: more than the models can write, and few enough for all that walks through a document."""
_LARGEST: Final = 50_000
"""Values in one document: many times what a resource has, and no more than the operator's memory holds."""
_NEWEST: Final = 2**62
"""Versions are below it: relays take none that is much higher, and there must be room for the next ones."""
_REMEMBERED: Final = 4
"""Texts of which the documents are: those of a look, and no more than the memory holds if they are large."""
_BELIEVABLE_AHEAD: Final = 24 * 3600 * 1000
"""Milliseconds: no two clocks of a cluster differ by more than a day."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What relays are told, and its version."""

    version: int
    text: str
    """YAML documents: the relay, then its subscriptions by name."""


def config_map(relay: OutboxRelay, configuration: Configuration, public_keys: str) -> dict[str, Any]:
    """The whole object."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(relay),
        "data": {RESOURCES_KEY: configuration.text, KEYS_KEY: public_keys},
    }


def next_configuration(
    relay: OutboxRelay,
    subscriptions: Iterable[EventSubscription],
    before: Configuration | None,
    now_ms: int,
    in_use: int = 0,
    kept: Iterable[Mapping[str, Any]] = (),
) -> Configuration:
    """The present one if nothing changed; else one with a version above every earlier one.

    The clock gives the version, so that it rises even where the ConfigMap was deleted and nothing is remembered.
    ``in_use`` is the highest version that relays report: they pass over everything that is older. A report from the
    far future is not believed. ``kept`` are subscriptions as relays know them already: each stays as it is, whether it
    can be read here or not, since relays forget how far a subscription has come that is missing.
    """
    documents = [*map(_document, subscriptions), *kept]
    in_use = in_use if in_use < now_ms + _BELIEVABLE_AHEAD else 0
    if before is not None and before.version >= in_use and before.text == _text(relay, documents, before.version):
        return before
    version = max(before.version + 1 if before is not None else 0, in_use + 1, now_ms)
    return Configuration(version, _text(relay, documents, version))


def all_paused(before: Configuration, now_ms: int) -> Configuration:
    """The same with every subscription paused; the very same where all are.

    Not one without subscriptions: relays would forget how far each had come.
    """
    documents = copy.deepcopy(list(_documents(before.text)))
    running = [each for each in documents if each.get("kind") == SUBSCRIPTION_KIND and not _is_paused(each)]
    if not running:
        return before
    for each in running:
        each["spec"]["state"] = State.PAUSED.value
    version = max(before.version + 1, now_ms)
    documents[0]["metadata"]["annotations"] = {CONFIG_VERSION_ANNOTATION: str(version)}
    return Configuration(version, _dumped(documents))


def _is_paused(subscription: Mapping[str, Any]) -> bool:
    return bool(subscription["spec"].get("state") == State.PAUSED)


def configuration_in(config_map: Mapping[str, Any] | None) -> Configuration | None:
    """What a ConfigMap says, or None where it says nothing that can be understood.

    Nor is a version understood that relays refuse: if it were kept, so would be the text that has it.
    """
    text = ((config_map or {}).get("data") or {}).get(RESOURCES_KEY)
    if not isinstance(text, str):
        return None
    try:
        version = next(_parsed(text))["metadata"]["annotations"][CONFIG_VERSION_ANNOTATION]
    except (StopIteration, KeyError, TypeError):
        return None
    if not (isinstance(version, str) and version.isascii() and version.isdigit() and len(version) < 20):
        return None
    return Configuration(int(version), text) if 0 < int(version) < _NEWEST else None


def read_ahead(*configurations: Configuration | None) -> None:
    """Parse what will be asked for soon. In a thread, where there is a loop: a large one takes a second."""
    for each in configurations:
        if each is not None:
            _documents(each.text)


def last_valid_form(configuration: Configuration | None, uid: str) -> dict[str, Any] | None:
    """A subscription as relays know it, for when its resource can't be used any more."""
    for document in _documents(configuration.text if configuration is not None else ""):
        if document.get("kind") == SUBSCRIPTION_KIND and _uid(document) == uid:
            return copy.deepcopy(document)
    return None


def knows_by_name(configuration: Configuration | None, namespace: str, name: str) -> bool:
    """Whether a subscription of this name is in it, this one or one that had the name before."""
    return any(
        document.get("kind") == SUBSCRIPTION_KIND and is_named(document, namespace, name)
        for document in _documents(configuration.text if configuration is not None else "")
    )


def is_named(document: Mapping[str, Any], namespace: str, name: str) -> bool:
    metadata = document.get("metadata")
    return isinstance(metadata, Mapping) and (metadata.get("namespace"), metadata.get("name")) == (namespace, name)


def _uid(document: Mapping[str, Any]) -> object:
    metadata = document.get("metadata")
    return metadata.get("uid") if isinstance(metadata, Mapping) else None


class _Loader(yaml.SafeLoader):
    """For what anybody may have written: takes no aliases, with which a few hundred bytes become more than any memory
    holds, nor what is too large or nested too deep for whoever handles the result."""

    _depth = 0
    _values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not taken")
        self._values = self._values + 1 if self._depth else 1
        self._depth += 1
        if self._depth > _DEEPEST or self._values > _LARGEST:
            raise yaml.YAMLError("a document is too large")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


@lru_cache(maxsize=_REMEMBERED)
def _documents(text: str) -> tuple[dict[str, Any], ...]:
    """All that can be read. Remembered, since each subscription that can't be used is looked up in the same text: copy
    what is handed out."""
    return tuple(_parsed(text))


def _parsed(text: str) -> Iterator[dict[str, Any]]:
    """One after the other, as far as they are asked for: parsing is slow. By Python's own parser, all the same: whoever
    may write a ConfigMap could crash the one in C, and with it the operator, by deep nesting."""
    try:
        yield from (document for document in yaml.load_all(text, _Loader) if isinstance(document, dict))
    except Exception:  # a tag that does not fit ("!!bool x") ends in whatever Python says to it
        return


def _text(relay: OutboxRelay, subscriptions: Iterable[Mapping[str, Any]], version: int) -> str:
    first = _document(relay)
    first["metadata"]["annotations"] = {CONFIG_VERSION_ANNOTATION: str(version)}
    return _dumped([first, *sorted(subscriptions, key=lambda each: str(each["metadata"]["name"]))])


def _dumped(documents: Iterable[Mapping[str, Any]]) -> str:
    text: str = yaml.dump_all(
        documents, Dumper=_DUMPER, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120
    )
    return text


def _document(resource: Resource) -> dict[str, Any]:
    """Who it is and what it should be; nothing of what others noted on it, so that a label changes no configuration.

    Without what is as it is by default. Relays refuse fields that they do not know, and sidecars stay as old as their
    pods: a field that a later version adds must not reach them before somebody uses it.
    """
    manifest = resource.manifest()
    differing = resource.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    wanted = ("name", "namespace", "uid", "generation")
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {field: manifest["metadata"][field] for field in wanted if field in manifest["metadata"]},
        "spec": differing["spec"],
    }
