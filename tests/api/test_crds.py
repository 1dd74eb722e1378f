"""Validation by a real API server: valid manifests are accepted, invalid ones are rejected with a useful message.

Every CEL rule has a manifest that violates it. Manifests that only the models can reject are listed with the reason
(``Later`` in ``bad_manifests.py``). For those, the operator reports Ready False with the reason InvalidSpec.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from mailboat_devservers.kubernetes import ApiServer
from mailboat_spec import SpecError, read_documents
from support.admission import Admission, Cause, PlacedRule, admission, rules
from support.bad_manifests import CONSUMED, PUBSUB_SOURCE, REFUSALS, RELAY, SUBSCRIPTION, Bad, Later, changed
from support.complete_manifests import COMPLETE

Body = dict[str, Any]

REFUSED = [(body, bad, bad.server or bad.what) for body, bad in REFUSALS if isinstance(bad.server, str)]
LATER = [(body, bad) for body, bad in REFUSALS if isinstance(bad.server, Later)]


def with_sink(**sink: Body) -> Body:
    return changed(SUBSCRIPTION, "spec.sink", sink)


def dead_letters_to(topic: str, body: Body) -> Body:
    return changed(body, "spec.delivery.deadLetter.topic", topic)


PUBSUB = with_sink(pubsub={"project": "acme", "topic": "orders"})
IDEMPOTENT = changed(CONSUMED, "spec.idempotency.redis.url", "redis://h")
INBOX = changed(CONSUMED, "spec.idempotency.postgres.url", "postgresql://h/d")
FROM_PUBSUB = changed(CONSUMED, "spec.source", PUBSUB_SOURCE)

# Contradictions between two fields, and other errors that the table of single fields does not contain.
AT_ODDS: list[Body] = [
    changed(changed(RELAY, "spec.runtime", "Sidecar"), "spec.replicas", 2),
    changed(SUBSCRIPTION, "metadata.name", "a" * 64),
    changed(SUBSCRIPTION, "metadata.name", "a.b"),
    changed(SUBSCRIPTION, "spec.start.time", "2026-01-31T12:00:00Z"),
    changed(SUBSCRIPTION, "spec.filter.eventTypes", ["\0"]),
    changed(SUBSCRIPTION, "spec.filter.aggregateTypes", ["[a-z]"]),
    changed(SUBSCRIPTION, "spec.filter.aggregateTypes", ["", "\0"]),
    dead_letters_to("orders", PUBSUB),
    dead_letters_to("no", PUBSUB),
    dead_letters_to("dead", with_sink(pull={})),
    dead_letters_to("no", FROM_PUBSUB),
    changed(FROM_PUBSUB, "spec.start.from", "Latest"),
]
URLS = {
    "spec.idempotency.redis": (IDEMPOTENT, "redis://h/0?password=hunter2"),
    "spec.idempotency.postgres": (INBOX, "postgresql://u:hunter2@h/d"),
}
for place, (body, with_password) in URLS.items():
    both = changed(body, f"{place}.urlSecretRef", {"name": "a", "key": "b"})
    AT_ODDS += [both, changed(body, f"{place}.url", with_password), changed(body, f"{place}.url", "gopher://h")]
    without = copy.deepcopy(body)
    here = without
    for step in place.split("."):
        here = here[step]
    del here["url"]
    AT_ODDS.append(without)


@pytest.fixture(scope="module")
def asked(api: ApiServer) -> Iterator[Admission]:
    namespace = f"admission-{secrets.token_hex(4)}"
    api.kubectl("create", "namespace", namespace)
    with admission(api, namespace) as asked:
        yield asked


@pytest.fixture(scope="module")
def all_refusals(asked: Admission) -> set[tuple[str, str, str]]:
    """Kind, field and message of every error that the server reports for the invalid manifests."""
    bodies = [changed(body, bad.path, bad.value) for body, bad, _ in REFUSED]
    return {
        (body["kind"], cause.place, cause.message)
        for body in (as_json(body) for body in (*bodies, *AT_ODDS))
        for cause in asked.refusals(body)
    }


def as_json(value: Any) -> Any:
    """Convert YAML dates to text, as kubectl does before it sends a manifest."""
    if isinstance(value, dict):
        return {name: as_json(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [as_json(inside) for inside in value]
    return value if isinstance(value, str | int | float | None) else value.isoformat()


@pytest.mark.parametrize("body", COMPLETE, ids=lambda body: body["metadata"]["name"])
def test_a_manifest_with_every_field_is_taken(asked: Admission, body: Body) -> None:
    assert asked.refusals(body) == []
    read_documents([("relay", RELAY), ("body", changed(body, "metadata.name", "another"))])


@pytest.mark.parametrize(("body", "bad", "words"), REFUSED, ids=lambda part: part.path if isinstance(part, Bad) else "")
def test_the_server_refuses_manifests_that_a_model_refuses(asked: Admission, body: Body, bad: Bad, words: str) -> None:
    causes = asked.refusals(as_json(changed(body, bad.path, bad.value)))
    assert any(words in cause.message and blames(cause, bad.where) for cause in causes), causes


def blames(cause: Cause, where: str) -> bool:
    """Return whether the error names that field, a mapping that contains it, or a field inside it."""
    theirs, ours = (re.findall(r'[^.\[\]"]+', path) for path in (cause.field, where))
    return all(their == our for their, our in zip(theirs, ours, strict=False))


def test_values_that_only_the_models_refuse_are_listed(asked: Admission) -> None:
    assert [bad.where for _, bad in LATER] == ['spec.sink.custom.config["auth.token"]', "spec.delivery.backoff.jitter"]
    body, bad = LATER[0]
    assert asked.refusals(changed(body, bad.path, bad.value)) == []


SCALARS = [rule for rule in rules() if rule.schema_type in ("string", "scalar")]
OBJECTS = [rule for rule in rules() if rule not in SCALARS and not rule.about_a_change]
CHANGES = [rule for rule in rules() if rule.about_a_change]
PATTERNS = ("spec.filter.eventTypes[]", "spec.filter.aggregateTypes[]")


@pytest.mark.parametrize("rule", [rule for rule in SCALARS if rule.place not in PATTERNS], ids=str)
def test_a_text_without_its_form_is_refused_in_words(asked: Admission, rule: PlacedRule) -> None:
    """The empty text violates every rule on the format of a text."""
    body = next(found for found in (emptied(body, rule) for body in COMPLETE) if found is not None)
    causes = asked.refusals(body)
    assert {cause.place for cause in causes} == {rule.blames}
    assert any(cause.message.endswith(rule.words) for cause in causes)


def emptied(body: Body, rule: PlacedRule) -> Body | None:
    """Return the manifest with an empty text at the rule's field, or None if the manifest has no such field."""
    if body["kind"] != rule.kind:
        return None
    body = json.loads(json.dumps(body))  # not a deepcopy, which would keep shared parts shared
    parent, last, here = body, "", body
    for step in rule.place.replace("[]", ".[]").split("."):
        if not here:
            return None
        key: Any = step
        if step == "[]":
            key = 0 if isinstance(here, list) else next(iter(here))
        if isinstance(here, dict) and key not in here:
            return None
        parent, last, here = here, key, here[key]
    parent[last] = ""
    return body


@pytest.mark.parametrize("rule", [*OBJECTS, *(rule for rule in SCALARS if rule.place in PATTERNS)], ids=str)
def test_every_rule_has_a_manifest_that_breaks_it(all_refusals: set[tuple[str, str, str]], rule: PlacedRule) -> None:
    assert any(
        kind == rule.kind and place == rule.blames and rule.words in message for kind, place, message in all_refusals
    )


def test_no_refusal_repeats_a_password(asked: Admission) -> None:
    said = [str(asked.refusals(changed(body, f"{place}.url", url))) for place, (body, url) in URLS.items()]
    assert all("holds a password" in words and "hunter2" not in words for words in said)


OTHER_VALUES: dict[str, object] = {
    "spec.relayRef": {"name": "other"},
    "spec.start": {"from": "Latest"},
    "spec.outbox.table": "public.other",
}


@pytest.mark.parametrize("rule", CHANGES, ids=str)
def test_immutable_fields_cannot_be_changed(asked: Admission, rule: PlacedRule) -> None:
    before = RELAY if rule.kind == "OutboxRelay" else SUBSCRIPTION
    causes = asked.refusals_of_change(before, changed(before, rule.blames, OTHER_VALUES[rule.blames]))
    assert [(cause.field, cause.message) for cause in causes] == [(rule.blames, f"Forbidden: {rule.words}")]


@pytest.mark.parametrize(
    ("body", "path", "value"),
    [
        (RELAY, "spec.runtime", "Sidecar"),
        (RELAY, "spec.replicas", 5),
        (RELAY, "spec.database.urlSecretRef.name", "other"),
        (SUBSCRIPTION, "spec.partitions", 16),
        (SUBSCRIPTION, "spec.state", "Paused"),
        (SUBSCRIPTION, "spec.sink", {"kafka": None, "log": {}}),
        (SUBSCRIPTION, "spec.start", {"from": "Earliest"}),
    ],
    ids=str,
)
def test_other_fields_can_be_changed(asked: Admission, body: Body, path: str, value: object) -> None:
    assert asked.refusals_of_change(body, changed(body, path, value)) == []


def test_the_models_refuse_contradictory_fields() -> None:
    for body in AT_ODDS:
        with pytest.raises(SpecError):
            read_documents([("relay", RELAY), ("body", body)] if body["kind"] != "OutboxRelay" else [("body", body)])
