"""Every refusal names its field and has the expected message."""

from __future__ import annotations

from typing import Any

import pytest

from mailboat_spec import SpecError, read_documents
from support.bad_manifests import KAFKA, REFUSALS, RELAY, SUBSCRIPTION, Bad, changed

LOG: dict[str, Any] = {"log": {}}


def problems(*bodies: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as refused:
        read_documents((f"document {number}", body) for number, body in enumerate(bodies, start=1))
    return [(problem.path, problem.message) for problem in refused.value.problems]


@pytest.mark.parametrize(("body", "bad"), REFUSALS, ids=lambda part: part.path if isinstance(part, Bad) else "")
def test_an_invalid_field_is_refused_by_name(body: dict[str, Any], bad: Bad) -> None:
    wrong = changed(body, bad.path, bad.value)
    ((found, message),) = problems(*([wrong] if body is RELAY else [RELAY, wrong]))
    assert found == bad.where
    assert bad.what in message


def test_a_sidecar_with_replicas_is_refused() -> None:
    body = changed(changed(RELAY, "spec.runtime", "Sidecar"), "spec.replicas", 2)
    ((where, what),) = problems(body)
    assert where == "spec.replicas"
    assert what == "a Sidecar has no replicas of its own, it runs in the application's pods: remove it"


def test_a_dead_letter_topic_needs_a_sink_with_topics() -> None:
    body = changed(changed(SUBSCRIPTION, "spec.sink", {"pull": {}}), "spec.delivery.deadLetter.topic", "dead")
    ((where, what),) = problems(RELAY, body)
    assert where == "spec.delivery.deadLetter"
    assert "a sink of kind pull has no topics: remove it" in what


def test_a_dead_letter_topic_has_the_form_of_its_sink() -> None:
    sink = {"pubsub": {"project": "acme", "topic": "orders"}}
    body = changed(changed(SUBSCRIPTION, "spec.sink", sink), "spec.delivery.deadLetter.topic", "no")
    assert problems(RELAY, body)[0][0] == "spec.delivery.deadLetter.topic"
    sink_without_forms = changed(changed(SUBSCRIPTION, "spec.sink", LOG), "spec.delivery.deadLetter.topic", "no")
    assert read_documents([("r", RELAY), ("s", sink_without_forms)]).subscriptions[0].spec.sink.kind == "log"


def test_no_refusal_repeats_a_secret() -> None:
    secret = "hunter2-4711"
    bodies = [
        changed(RELAY, "spec.database", {"url": f"postgresql://u:{secret}@h/db"}),
        changed(RELAY, "spec.database", {"url": f"host=h password={secret}"}),
        changed(RELAY, "spec.database", {"url": "postgresql://h", "password": secret}),
        changed(RELAY, "spec.template.env", [{"name": "DB_PASSWORD", "value": secret}]),
        changed(SUBSCRIPTION, f"{KAFKA}.config", {"sasl.password": secret}),
        changed(SUBSCRIPTION, f"{KAFKA}.config", {"sasl.password": [secret]}),
        changed(SUBSCRIPTION, f"{KAFKA}.configSecretRef", secret),
        changed(SUBSCRIPTION, "spec.sink", {"custom": {"type": "nats", "config": {"password": secret}}}),
    ]
    for body in bodies:
        with pytest.raises(SpecError) as refused:
            read_documents([("document", body)])
        assert secret not in str(refused.value)
        assert secret not in repr(refused.value.problems)
