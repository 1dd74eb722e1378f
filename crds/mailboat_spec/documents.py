"""Validation of parsed documents (YAML or JSON) into a set of resources with unique names and existing relays.

Files are valid input for ``kubectl apply``, so an application's own Deployment or Secret may appear beside Mailboat's
resources and is ignored. A kind similar to one of Mailboat's is not ignored, but reported as a misspelling.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeGuard

from pydantic import ValidationError

from mailboat_spec.names import API_VERSION, DEFAULT_NAMESPACE, GROUP, RELAY_KIND, SUBSCRIPTION_KIND
from mailboat_spec.resources.relay import OutboxRelay
from mailboat_spec.resources.subscription import EventSubscription
from mailboat_spec.validation_errors import Problem, SpecError, choice_message, nearest, problems_of

_MODELS: Final[Mapping[str, type[OutboxRelay] | type[EventSubscription]]] = {
    RELAY_KIND: OutboxRelay,
    SUBSCRIPTION_KIND: EventSubscription,
}
_FOREIGN: Final = (
    f'"{{}}" is not a resource of Mailboat, only {" and ".join(_MODELS)} are, and there is none of them here'
)


@dataclass(frozen=True, slots=True)
class Manifests:
    """A consistent set of resources, in the order of their documents."""

    relays: tuple[OutboxRelay, ...]
    subscriptions: tuple[EventSubscription, ...]


class _Document(NamedTuple):
    """One document of a Mailboat kind, valid or not."""

    source: str
    kind: str
    namespace: str
    name: str | None
    relay: str | None
    """Name of the relay that a subscription refers to."""
    resource: OutboxRelay | EventSubscription | None
    """None if the document is invalid."""


def read_documents(documents: Iterable[tuple[str, object]]) -> Manifests:
    """Validate every document and the whole set; raise ``SpecError`` with all problems.

    Each document has a label with its origin (``orders.yaml, document 2``). Lists, as printed by ``kubectl get -o
    yaml``, are expanded. If only resources of other API groups are found, that is a problem.
    """
    problems: list[Problem] = []
    read: list[_Document] = []
    foreign: list[Problem] = []
    order: dict[str, int] = {}
    for source, body in _opened(documents):
        order.setdefault(source, len(order))
        if _is_foreign(body):
            foreign.append(Problem(source, "kind", _FOREIGN.format(body["kind"])))
        elif (document := _read(source, body, problems)) is not None:
            read.append(document)
    problems += [*_duplicates(read), *_dangling_references(read)]
    if not read and not problems:
        problems.extend(foreign[:1])
    if problems:
        raise SpecError(tuple(sorted(problems, key=lambda problem: order[problem.source])))
    resources = [document.resource for document in read]
    return Manifests(
        relays=tuple(resource for resource in resources if isinstance(resource, OutboxRelay)),
        subscriptions=tuple(resource for resource in resources if isinstance(resource, EventSubscription)),
    )


def read_document(source: str, body: Mapping[str, Any]) -> OutboxRelay | EventSubscription:
    """Validate one resource of the API server, without the others that it refers to. Raise ``SpecError``."""
    problems: list[Problem] = []
    document = _read(source, body, problems)
    if document is None or document.resource is None or problems:
        raise SpecError(tuple(problems))
    return document.resource


def _opened(documents: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    for source, body in documents:
        if body is None:
            continue
        if isinstance(body, Mapping) and isinstance(body.get("items"), list) and str(body.get("kind")).endswith("List"):
            yield from _opened((f"{source}, item {number}", item) for number, item in enumerate(body["items"], start=1))
        else:
            yield source, body


def _is_foreign(body: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether the document is a resource of another API group and its kind is no misspelling of Mailboat's."""
    if not isinstance(body, Mapping):
        return False
    kind, version = body.get("kind"), body.get("apiVersion")
    if not (isinstance(kind, str) and kind and isinstance(version, str) and version):
        return False
    return version.partition("/")[0] != GROUP and kind not in _MODELS and nearest(kind, tuple(_MODELS)) is None


def _read(source: str, body: object, problems: list[Problem]) -> _Document | None:
    """Return a document, or None if it is of no Mailboat kind. A wrong apiVersion is reported; validation continues."""
    if not isinstance(body, Mapping):
        problems.append(
            Problem(source, "", "is not a resource: it must be a mapping with apiVersion, kind, metadata, spec")
        )
        return None
    kind, version, kinds = body.get("kind"), body.get("apiVersion"), tuple(_MODELS)
    if kind not in kinds:
        required = f"is required: {' or '.join(kinds)}"
        problems.append(Problem(source, "kind", required if kind is None else choice_message(kind, kinds)))
        return None
    if version is None:
        problems.append(Problem(source, "apiVersion", f"is required: write apiVersion: {API_VERSION}"))
    elif version != API_VERSION:
        problems.append(Problem(source, "apiVersion", choice_message(version, (API_VERSION,))))
    model, resource = _MODELS[kind], None
    try:
        resource = model.model_validate({**body, "apiVersion": API_VERSION}, by_alias=True, by_name=False)
    except ValidationError as error:
        problems.extend(problems_of(source, model, error))
    return _Document(
        source,
        kind,
        namespace=_text_at(body, "metadata", "namespace") or DEFAULT_NAMESPACE,
        name=_text_at(body, "metadata", "name"),
        relay=_text_at(body, "spec", "relayRef", "name") if kind == SUBSCRIPTION_KIND else None,
        resource=resource,
    )


def _duplicates(read: list[_Document]) -> Iterator[Problem]:
    first: dict[tuple[str, str, str], _Document] = {}
    for document in read:
        if document.name is None:
            continue
        before = first.setdefault((document.kind, document.namespace, document.name), document)
        if before is not document:
            yield Problem(
                document.source,
                "metadata.name",
                f"{document.kind} {document.namespace}/{document.name} is there already ({before.source}): rename one",
            )


def _dangling_references(read: list[_Document]) -> Iterator[Problem]:
    """Yield references to missing relays. An invalid relay counts as present: its own problem is reported already."""
    relays = {(relay.namespace, relay.name) for relay in read if relay.kind == RELAY_KIND and relay.name is not None}
    for document in read:
        target = document.relay
        if target is None or (document.namespace, target) in relays:
            continue
        message = f'no OutboxRelay is called "{target}" in namespace {document.namespace}'
        siblings = sorted(str(name) for namespace, name in relays if namespace == document.namespace)
        elsewhere = sorted(namespace for namespace, name in relays if name == target)
        if meant := nearest(target, siblings):
            message += f"; did you mean {meant}?"
        elif elsewhere:
            message += f", only in {', '.join(elsewhere)}: both must have the same metadata.namespace"
        else:
            message += f": add its manifest, or name one that is there ({', '.join(siblings) or 'none is'})"
        yield Problem(document.source, "spec.relayRef.name", message)


def _text_at(body: object, *path: str) -> str | None:
    for step in path:
        body = body.get(step) if isinstance(body, Mapping) else None
    return body if isinstance(body, str) and body else None
