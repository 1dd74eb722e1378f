"""Configuration of a consumer, from its manifest, its arguments, or the database alone."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mailboat.consumer.arguments import Inbox, Kafka, PubSub, Redis
from mailboat.errors import ConfigError
from mailboat.runtime.secrets import Secrets
from mailboat.store.table import TableLayout, renamed
from mailboat_spec import API_VERSION, EventSubscription, OutboxRelay, SpecError, full_name, read_documents

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Settings of a consumer's subscription before the database is queried."""

    subscription: str
    """namespace/name."""
    url: str | None
    resource: EventSubscription | None
    """None if the subscription is already declared in the database."""
    layout: TableLayout
    relay: OutboxRelay | None = None
    """OutboxRelay of the manifests, which has the retention of the outbox."""
    outbox: str | None = None
    """Outbox of the subscription. None if neither arguments nor manifests name it; then the database finds it."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Settings of a consumer with a source."""

    resource: EventSubscription
    secrets: Secrets
    manifests: tuple[Path, ...] = ()
    """Files to follow; none if the settings are arguments."""


class _GivenSecrets(Secrets):
    """Secrets from arguments."""

    def __init__(self, values: Mapping[str, Mapping[str, str]]) -> None:
        self._values = values

    def read(self, name: str, key: str) -> str:
        return self._values[name][key]

    def all(self, name: str) -> dict[str, str]:
        return dict(self._values[name])


def from_source(
    name: str,
    source: Kafka | PubSub,
    idempotency: Redis | Inbox | None,
    dead_letter: str | None,
    spec: Mapping[str, Any] | None,
) -> BrokerSettings:
    """Return settings from arguments. ``spec`` has further fields of an EventSubscription's spec."""
    namespace, _, plain = qualified(name).partition("/")
    whole: dict[str, Any] = {"sink": {"pull": {}}, **(spec or {}), **source.spec()}
    values = source.secrets()
    if idempotency is not None:
        whole |= idempotency.spec()
        values |= idempotency.secrets()
    if dead_letter is not None:
        delivery = whole.get("delivery", {})
        whole["delivery"] = {**delivery, "deadLetter": {**delivery.get("deadLetter", {}), "topic": dead_letter}}
    body = {
        "apiVersion": API_VERSION,
        "kind": "EventSubscription",
        "metadata": {"name": plain, "namespace": namespace},
        "spec": whole,
    }
    try:
        (resource,) = read_documents([(f"Consumer({name!r})", body)]).subscriptions
    except SpecError as error:
        raise ConfigError(str(error)) from error
    return BrokerSettings(resource, _GivenSecrets(values))


def from_arguments(name: str, url: str | None, spec: Mapping[str, Any] | None, outbox: str | None) -> ConsumerSettings:
    """Return settings from arguments. ``spec`` has the fields of an EventSubscription's spec; sink and relayRef are
    optional."""
    layout = TableLayout() if outbox is None else TableLayout(outbox)
    if spec is None:
        return ConsumerSettings(qualified(name), url, None, layout, outbox=outbox)
    namespace, _, plain = qualified(name).partition("/")
    body = {
        "apiVersion": "mailboat.dev/v1alpha1",
        "kind": "EventSubscription",
        "metadata": {"name": plain, "namespace": namespace},
        "spec": {"relayRef": {"name": plain}, "sink": {"pull": {}}, **spec},
    }
    relay = {
        "apiVersion": "mailboat.dev/v1alpha1",
        "kind": "OutboxRelay",
        "metadata": {"name": plain, "namespace": namespace},
        "spec": {"database": {"url": "postgresql://unused/"}},
    }
    try:
        (resource,) = read_documents([(f"Consumer({name!r})", body), ("relay", relay)]).subscriptions
    except SpecError as error:
        raise ConfigError(str(error)) from error
    return ConsumerSettings(qualified(name), url, resource, layout, outbox=outbox)


def from_manifests(
    name: str, manifests: Paths, url: str | None, secrets_dir: Path | None = None
) -> ConsumerSettings | BrokerSettings:
    """Return settings from the EventSubscription of this name, with or without namespace, and its OutboxRelay if it
    reads an outbox."""
    from mailboat.runtime.manifest_files import load
    from mailboat.runtime.secrets import database_url, find_secrets

    paths = [Path(each) for each in ([manifests] if isinstance(manifests, str | Path) else manifests)]
    loaded = load(paths, needs_relay=False)
    found = [each for each in loaded.subscriptions if name in (full_name(each), each.metadata.name)]
    if len(found) != 1:
        names = ", ".join(full_name(each) for each in loaded.subscriptions) or "none"
        raise ConfigError(
            f"there is {'no' if not found else 'more than one'} EventSubscription {name} in"
            f" {', '.join(map(str, paths))}; there are: {names}."
        )
    (resource,) = found
    if resource.spec.sink.pull is None:
        raise ConfigError(
            f"EventSubscription {full_name(resource)}: spec.sink must be pull: {{}} for a consumer,"
            f" not {resource.spec.sink.kind}."
        )
    secrets = find_secrets(secrets_dir, os.environ)
    if resource.spec.source is not None:
        return BrokerSettings(resource, secrets, tuple(paths))
    relay = _relay_of(resource, loaded.relays)
    if url is None:
        url = database_url(relay, secrets)
    layout = TableLayout(relay.spec.outbox.table, renamed(relay.spec.outbox.columns))
    return ConsumerSettings(full_name(resource), url, resource, layout, relay, layout.table)


def qualified(name: str) -> str:
    """Return ``namespace/name``. The default namespace is ``default``, as in manifests."""
    return name if "/" in name else f"default/{name}"


def _relay_of(resource: EventSubscription, relays: Sequence[OutboxRelay]) -> OutboxRelay:
    relay_key = (resource.metadata.namespace, resource.spec.relay)
    for relay in relays:
        if (relay.metadata.namespace, relay.metadata.name) == relay_key:
            return relay
    raise ConfigError(
        f"EventSubscription {full_name(resource)}: its OutboxRelay {relay_key[1]} is not among the manifests."
    )
