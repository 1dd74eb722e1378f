"""Whether a child still is what it should be, and the reason that is given where it is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_operator.controller.drift import differences, outcome

DESIRED: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "orders-relay", "namespace": "shop", "labels": {"a": "1"}},
    "spec": {
        "selector": {"mailboat.dev/relay": "orders"},
        "ports": [{"name": "mailboat", "port": 9808, "protocol": "TCP"}],
        "args": ["run", "--follow"],
    },
}
FIELDS: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:a": {}}},
    "f:spec": {
        "f:selector": {},
        "f:args": {},
        "f:ports": {'k:{"port":9808,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}, "f:protocol": {}}},
    },
}


def live(fields=None, **spec):
    found = copy.deepcopy(DESIRED)
    found["spec"].update(spec)
    found["metadata"]["uid"] = "1"
    found["metadata"]["managedFields"] = [
        {"manager": "mailboat-operator", "operation": "Apply", "fieldsV1": FIELDS if fields is None else fields},
        {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:status": {}}},
    ]
    found["status"] = {"anything": 1}
    return found


def test_what_was_applied_is_no_drift_whatever_the_server_adds():
    assert differences(DESIRED, live(clusterIP="None", sessionAffinity="None")) == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"args": ["run"]}, "spec.args has entries that are missing"),
        ({"args": ["run", "--evil"]}, "spec.args[1] was changed"),
        ({"ports": [{"name": "mailboat", "port": 1, "protocol": "TCP"}]}, "spec.ports[mailboat].port was changed"),
        ({"ports": [{"name": "theirs", "port": 9808}]}, "spec.ports[mailboat] is missing"),
        ({"selector": {}}, "spec.selector.mailboat.dev/relay is missing"),
    ],
)
def test_a_change_is_named(spec, reason):
    assert differences(DESIRED, live(**spec)) == [reason]


def test_an_entry_that_somebody_puts_between_ours_is_his():
    theirs = {"name": "theirs", "port": 1}
    assert differences(DESIRED, live(ports=[theirs, *DESIRED["spec"]["ports"]])) == []


def test_a_field_that_is_one_piece_was_taken_over_even_if_our_part_is_still_in_it():
    fields = copy.deepcopy(FIELDS)
    del fields["f:spec"]["f:selector"]
    found = live(fields, selector={"mailboat.dev/relay": "orders", "app": "theirs"})
    assert differences(DESIRED, found) == ["spec.selector was taken over by somebody else"]


def test_a_field_that_we_once_applied_and_no_longer_want_is_found():
    fields = copy.deepcopy(FIELDS)
    fields["f:spec"]["f:nodeSelector"] = {"f:disk": {}}
    fields["f:spec"]["f:ports"]['k:{"port":1,"protocol":"TCP"}'] = {".": {}}
    found = live(fields, nodeSelector={"disk": "fast"})
    assert differences(DESIRED, found) == [
        'spec.ports[{"port":1,"protocol":"TCP"}] is no longer wanted',
        "spec.nodeSelector is no longer wanted",
    ]


def test_an_object_that_we_never_applied_is_not_ours_yet():
    found = live()
    found["metadata"]["managedFields"] = []
    assert differences(DESIRED, found) == ["it is not managed by Mailboat any more"]


def test_another_spelling_is_the_outcome_of_our_own_apply_until_somebody_changes_it():
    desired = {**DESIRED, "spec": {"cpu": "1000m"}}
    fields = {"f:metadata": FIELDS["f:metadata"], "f:spec": {"f:cpu": {}}}
    applied = {**live(fields), "spec": {"cpu": "1"}}
    assert outcome(desired, applied).reasons == ("spec.cpu was changed",)
    assert outcome(desired, copy.deepcopy(applied)) == outcome(desired, applied)
    assert outcome(desired, {**applied, "spec": {"cpu": "1", "added": 1}}) == outcome(desired, applied)
    assert outcome(desired, {**applied, "spec": {"cpu": "2"}}) != outcome(desired, applied)


JSON = st.recursive(
    st.booleans() | st.integers(0, 3) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, min_size=1),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["p", "q", "r"]), JSON, min_size=1), st.sampled_from(["p", "q", "r"]), JSON)
def test_an_object_matches_itself_and_nothing_with_another_value(spec, key, value):
    def found(content):
        fields: dict[str, Any] = {"f:metadata": {}, "f:spec": {f"f:{each}": {} for each in spec}}
        entry = {"manager": "mailboat-operator", "operation": "Apply", "fieldsV1": fields}
        return {"metadata": {"managedFields": [entry]}, "spec": content}

    desired = {"metadata": {}, "spec": spec}
    assert differences(desired, found(copy.deepcopy(spec))) == []
    if key in spec and not contains(value, spec[key]):
        assert differences(desired, found({**spec, key: value})) != []


def contains(found, wanted):
    """An independent reading of 'everything that we want is there'."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(each in found and contains(found[each], wanted[each]) for each in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) >= len(wanted) and all(map(contains, found, wanted))
    return found == wanted
