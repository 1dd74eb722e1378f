"""Parsing of resources, and the last valid form of a subscription that became invalid."""

from __future__ import annotations

import pytest

from mailboat_operator.relays.observation import SubscriptionParser, find_last_valid_form
from mailboat_operator.relays.pods import relay_pod
from mailboat_operator.relays.reports import Answer
from mailboat_operator.resources.configmap import Configuration, item, next_configuration
from mailboat_spec import EventSubscription, OutboxRelay
from support.manifests import event_subscription, outbox_relay
from support.relay_statuses import process_status

RELAY = "shop/orders"
GARBLED = None
"""Result of reading a ConfigMap without a valid configuration."""


def subscription(uid="new"):
    return EventSubscription.model_validate(event_subscription("out", metadata={"uid": uid}))


def configuration(*subscriptions, version=5):
    relay = OutboxRelay.model_validate(outbox_relay(metadata={"uid": "u1"}))
    return next_configuration(relay, map(item, subscriptions), None, now_ms=version)


def reports(*names, version=5):
    relay = {"name": RELAY, "subscriptions": [{"name": name} for name in names]}
    pod = relay_pod({"metadata": {"namespace": "shop", "name": "a", "uid": "u-a"}})
    return Answer(pod, process_status({"relays": [relay], "config": {"version": version}}))


INVALID = {
    "apiVersion": "mailboat.dev/v1alpha1",
    "kind": "EventSubscription",
    "metadata": {"name": "out", "namespace": "shop", "uid": "new"},
    "spec": {"nonsense": True},
}
WORKED = {**INVALID, "status": {"partitions": [{"partition": 0, "pod": "a"}]}}
UNREADABLE = Configuration(5, configuration(subscription()).text.replace('"log":{}', '"log":{"of":"another version"}'))


@pytest.mark.parametrize(
    ("found", "written", "pushed", "answers", "form", "lost"),
    [
        pytest.param(INVALID, configuration(subscription()), None, (), True, False, id="it is in the ConfigMap"),
        pytest.param(INVALID, UNREADABLE, None, (), True, False, id="as something that the model refuses"),
        pytest.param(INVALID, GARBLED, configuration(subscription()), (), True, False, id="it was told to relays"),
        pytest.param(INVALID, configuration(), configuration(subscription()), (), True, False, id="but was taken out"),
        pytest.param(INVALID, configuration(), None, (), False, False, id="it never was valid"),
        pytest.param(INVALID, None, None, (reports(),), False, False, id="and there is nothing yet"),
        pytest.param(INVALID, GARBLED, None, (reports("shop/out"),), False, True, id="only relays know it"),
        pytest.param(WORKED, GARBLED, None, (), False, True, id="relays knew it when they last answered"),
        pytest.param(INVALID, configuration(), None, (reports("shop/out"),), False, True, id="it was cut out by hand"),
        pytest.param(
            INVALID, configuration(version=6), None, (reports("shop/out"),), False, False, id="a relay is behind"
        ),
        pytest.param(
            INVALID, configuration(subscription("old")), None, (reports("shop/out"),), False, False, id="a predecessor"
        ),
    ],
)
def test_the_last_valid_form_is_found_or_reported_as_lost(found, written, pushed, answers, form, lost):
    found_form, is_lost = find_last_valid_form(found, RELAY, written, pushed, answers)
    assert (found_form is not None, is_lost) == (form, lost)


def test_a_subscription_is_parsed_once_per_version_and_reported_if_invalid():
    def resource(name, **changes):
        return event_subscription(name, metadata={"uid": name, "resourceVersion": "1"}) | changes

    parser, found = SubscriptionParser(), [resource("a", spec={"nonsense": True}), resource("b")]
    invalid, valid = parser.read(found)
    assert (invalid.subscription, valid.problem) == (None, "")
    assert "nonsense: unknown field" in invalid.problem
    assert parser.read(found)[1] is valid
