"""Status from relay reports: the same reports give the same status, with the time of the last change."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_operator.controller.consumers import RestartTotal
from mailboat_operator.controller.status_writer import status_patch
from mailboat_operator.relays.observation import Observation
from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, bounded
from mailboat_operator.resources.pod import secret_volume
from mailboat_operator.status.conditions import Blocker, condition_events, overdue
from mailboat_operator.status.relay import database_changed
from mailboat_operator.status.relay import relay_status as status_of_relay
from mailboat_operator.status.subscription import SubscriptionFacts, subscription_status
from mailboat_spec import EventSubscription, OutboxRelay, Reason
from mailboat_spec.relay_status import ProcessStatus, as_json, read_process_status
from mailboat_spec.resources.status import EventSubscriptionStatus, OutboxRelayStatus
from support.manifests import DATABASE_SECRET, event_subscription, outbox_relay
from support.relay_statuses import process_status

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
NAME, RELAY = "shop/out", "shop/orders"


def subscription(**spec):
    return EventSubscription.model_validate(event_subscription("out", **{"partitions": 2, **spec}))


def owned(number, **fields):
    return {"partition": number, "lag": 0, **fields}


def pod(name, **changes):
    mounted = frozenset({secret_volume(DATABASE_SECRET)})
    plain = RelayPod("shop", name, f"uid-{name}", "10.0.0.1:9808", True, True, False, False, False, True, mounted)
    return replace(plain, **changes)


def answer(pod_name="a", partitions=(), *, relay=None, config=None, **fields):
    report = {"name": NAME, "owned": list(partitions), **fields}
    whole = {"name": RELAY, "databaseReachable": True, "schemaReady": True, "subscriptions": [report], **(relay or {})}
    return Answer(pod(pod_name), process_status({"relays": [whole], "config": config or {}}))


BOTH = (answer("a", [owned(0)]), answer("b", [owned(1)]))
FACTS = SubscriptionFacts(
    name=NAME, generation=3, before={}, subscription=subscription(), relay=RELAY, relay_exists=True, problem="",
    answers=BOTH, lacking=(),
)  # fmt: skip


def conditions(status):
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def test_a_healthy_subscription_has_these_conditions():
    status = subscription_status(FACTS, NOW)
    assert conditions(status) == {
        "Ready": ("True", "Delivering"),
        "SinkReachable": ("True", "Reachable"),
        "Assigned": ("True", "AllAssigned"),
        "Paused": ("False", "Running"),
        "KeysBlocked": ("False", "NothingBlocked"),
        "SecretsMounted": ("True", "UpToDate"),
    }
    assert [(each["partition"], each["pod"]) for each in status["partitions"]] == [(0, "a"), (1, "b")]
    assert (status["sink"], status["observedGeneration"]) == ("log", 3)
    parsed = {each.type: each.status for each in EventSubscriptionStatus.model_validate(status).conditions}
    assert parsed["Ready"] == "True"


def test_partitions_of_a_pull_subscription_belong_to_consumers():
    """One relay reports the lag of all partitions and owns none."""
    status_writer = answer("a", [owned(0, lag=5), owned(1)])
    facts = replace(FACTS, subscription=subscription(sink={"pull": {}}), answers=(status_writer, answer("b")))
    status = subscription_status(facts, NOW)
    found = conditions(status)
    assert found["Ready"] == ("True", "Delivering")
    assert not {"Assigned", "SinkReachable"} & set(found)
    assert [(each["pod"], each["lag"]) for each in status["partitions"]] == [("", 5), ("", 0)]
    assert conditions(subscription_status(replace(facts, answers=(answer("b"),)), NOW))["Ready"][1] == "Delivering"


NO_TABLES = {
    "databaseReachable": False,
    "schemaReady": False,
    "message": "a table is missing",
    "reason": "SchemaMismatch",
}


@pytest.mark.parametrize(
    ("changes", "ready", "progress"),
    [
        ({"problem": "spec.sink: no"}, ("False", "InvalidSpec"), "Stalled"),
        ({"relay_exists": False, "answers": ()}, ("False", "RelayNotFound"), "Stalled"),
        ({"answers": ()}, ("False", "NotEnoughRelays"), "Reconciling"),
        ({"answers": (Answer(pod("a"), None, "no route"),)}, ("Unknown", "Starting"), "Reconciling"),
        ({"answers": (answer(name="shop/other"),)}, ("False", "Progressing"), "Reconciling"),
        ({"answers": (answer(relay={"databaseReachable": False}),)}, ("False", "DatabaseUnreachable"), None),
        ({"answers": BOTH[:1]}, ("False", "PartitionsWithoutOwner"), "Reconciling"),
        ({"answers": (answer("a", [owned(0), owned(1)], sinkReachable=False),)}, ("False", "SinkUnavailable"), None),
        (
            {"answers": (answer("a", [owned(0), owned(1)], sinkReachable=None),)},
            ("Unknown", "Connecting"),
            "Reconciling",
        ),
        (
            {"answers": (answer(state="Failed", lastError="secret x was not found", reason="SecretNotFound"),)},
            ("False", "SecretNotFound"),
            "Stalled",
        ),
        ({"answers": (answer(state="Failed", lastError="no such sink"),)}, ("False", "SinkNotSupported"), "Stalled"),
        ({"subscription": subscription(state="Paused")}, ("True", "PausedBySpec"), None),
        ({"answers": (answer("a", [owned(0), owned(1)], state="Paused"),)}, ("False", "PausedByCommand"), None),
    ],
)
def test_reasons_for_not_ready(changes, ready, progress):
    found = conditions(subscription_status(replace(FACTS, **changes), NOW))
    assert found["Ready"] == ready
    assert {"Stalled", "Reconciling"} & set(found) == ({progress} if progress else set())


def test_numbers_are_added_up_over_relays():
    answers = (
        answer("a", [owned(0, lag=70, oldestAge=61.0, parked=1)], rate=10.4, dead=2, lastError="refused"),
        answer("b", [owned(1, lag=64, lagBounded=True)], rate=10.4, dead=2),
    )
    status = subscription_status(replace(FACTS, answers=answers), NOW)
    assert (status["lag"], status["lagDisplay"], status["oldestAge"]) == (130, "130+", "1m")
    assert (status["parked"], status["dead"], status["rate"], status["lastError"]) == (1, 2, 21.0, "refused")
    assert status["partitions"][0] == {"partition": 0, "pod": "a", "lag": 70, "oldestAge": "1m"}


def test_the_last_error_has_the_time_at_which_it_happened():
    def status(now, before, **fields):
        answers = (answer("a", [owned(0), owned(1)], **fields),)
        return subscription_status(replace(FACTS, before=before, answers=answers), now)

    first = status(NOW, {}, lastError="refused", lastErrorAge=60.0)
    assert (first["lastError"], first["lastErrorTime"]) == ("refused", "2026-01-31T11:59:00Z")
    later = NOW + timedelta(minutes=5)
    assert status(later, first, lastError="refused", lastErrorAge=361.0) == first, "the same occurrence"
    again = status(later, first, lastError="refused", lastErrorAge=0.5)
    assert again["lastErrorTime"] == "2026-01-31T12:04:59Z"
    lasts = status(later, again, lastError="away", lastErrorAge=0.0)
    assert status(later + timedelta(hours=1), lasts, lastError="away", lastErrorAge=0.0) == lasts
    assert "lastErrorTime" not in status(later, lasts)


@pytest.mark.parametrize(
    "answers", [(), (Answer(pod("a"), None, "away"),), (Answer(pod("a"), None, "away", silent=True),)]
)
def test_lag_is_unknown_while_no_relay_reports(answers):
    """G7: no relay, a relay that never responded, and a relay that stopped responding."""
    before = subscription_status(replace(FACTS, answers=(answer("a", [owned(0, lag=9)], dead=3), BOTH[1])), NOW)
    status = subscription_status(replace(FACTS, before=before, answers=answers), NOW)
    assert (status["lagDisplay"], status["dead"]) == ("unknown", 3)
    assert status.keys().isdisjoint({"lag", "oldestAge"})
    assert status["partitions"] == [{"partition": 0, "pod": "a"}, {"partition": 1, "pod": "b"}], "that it once worked"


OWNERS = {"0": "shop/a", "1": "shop/b"}
HUNG = replace(answer("b", [owned(1, lag=0)], owners=OWNERS), error="did not answer in time", silent=True)
CUT_OFF = answer("b", [owned(1, lag=0)], owners=OWNERS)
"""A relay that lost only the database: it still responds, and does not yet report the loss."""


@pytest.mark.parametrize(("silent", "why"), [(HUNG, "did not answer in time"), (CUT_OFF, "its heartbeats are missing")])
def test_a_silent_relay_is_named_at_once_and_its_partitions_are_counted_by_another(silent, why):
    counting = answer("a", [owned(0, lag=1)], orphans=[owned(1, lag=60)], owners=OWNERS, relay={"silent": ["shop/b"]})
    status = subscription_status(replace(FACTS, answers=(counting, silent)), NOW)
    found = conditions(status)
    assert found["Ready"] == found["Assigned"] == ("False", "RelaySilent")
    assert f"b: {why}" in status["conditions"][0]["message"]
    assert (status["lag"], status["lagDisplay"], status["partitions"][1]["pod"]) == (61, "61", "b")
    assert [
        item.warning for item in condition_events(subscription_status(FACTS, NOW)["conditions"], status["conditions"])
    ] == [True]
    of_relay = relay_status(replace(RELAY_FACTS, answers=(counting, silent)), NOW)
    assert conditions(of_relay)["Ready"] == ("False", "RelaySilent")
    not_counted_yet = replace(FACTS, answers=(answer("a", [owned(0, lag=1)], owners=OWNERS), HUNG))
    assert subscription_status(not_counted_yet, NOW)["lagDisplay"] == "1+", "at least"


def test_an_owner_that_the_store_names_counts_if_it_is_there():
    answers = (answer("a", [owned(0)], owners={"0": "shop/a", "1": "shop/b"}), Answer(pod("b"), None, "slow"))
    assert conditions(subscription_status(replace(FACTS, answers=answers), NOW))["Assigned"][0] == "True"
    assert conditions(subscription_status(replace(FACTS, answers=answers[:1]), NOW))["Assigned"][0] == "False"
    namesake = (answer("a", [owned(0)], owners={"0": "shop/a", "1": "elsewhere/b"}), Answer(pod("b"), None, "slow"))
    assert conditions(subscription_status(replace(FACTS, answers=namesake), NOW))["Assigned"][0] == "False"


def test_the_same_reports_produce_the_same_status_and_no_patch():
    first = subscription_status(FACTS, NOW)
    later = subscription_status(replace(FACTS, before=first), NOW + timedelta(hours=1))
    assert later == first
    assert status_patch(first, later, allow_counters_only=True) is None


def test_the_time_of_a_condition_is_that_of_its_last_change():
    first = subscription_status(FACTS, NOW)
    unreachable = replace(FACTS, before=first, answers=(answer("a", [owned(0), owned(1)], sinkReachable=False),))
    second = subscription_status(unreachable, NOW + timedelta(hours=1))
    times = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    assert (times["Ready"], times["Assigned"]) == ("2026-01-31T13:00:00Z", "2026-01-31T12:00:00Z")


def test_counters_alone_are_no_reason_to_write_every_time():
    before = {"rate": 1.0, "lag": 0}
    assert status_patch(before, {"rate": 2.0, "lag": 0}, allow_counters_only=False) is None
    assert status_patch(before, {"rate": 2.0, "lag": 0}, allow_counters_only=True) == {"rate": 2.0}
    assert status_patch(before, {"rate": 2.0}, allow_counters_only=False) == {"rate": 2.0, "lag": None}


def test_only_changes_are_reported():
    well = subscription_status(FACTS, NOW)["conditions"]
    unreachable = replace(FACTS, answers=(answer("a", [owned(0), owned(1)], sinkReachable=False),))
    ill = subscription_status(unreachable, NOW)["conditions"]
    assert [(item.warning, item.reason) for item in condition_events((), well)] == [(False, "Delivering")]
    assert condition_events(well, well) == []
    assert {(item.warning, item.reason) for item in condition_events(well, ill)} == {(True, "SinkUnavailable")}
    assert (False, "Delivering") in {(item.warning, item.reason) for item in condition_events(ill, well)}


def test_the_steps_of_a_start_are_no_events_but_a_fall_back_to_them_is():
    stages = [
        subscription_status(replace(FACTS, answers=answers), NOW)["conditions"]
        for answers in ((), (Answer(pod("a"), None, "no answer"),), (answer("a", [owned(0)]),), FACTS.answers)
    ]
    assert [each["reason"] for stage in stages for each in stage if each["type"] == "Ready"] == [
        "NotEnoughRelays",
        "Starting",
        "PartitionsWithoutOwner",
        "Delivering",
    ]
    events = [condition_events(before, after) for before, after in itertools.pairwise([(), *stages])]
    assert [[item.reason for item in items] for items in events] == [[], [], [], ["Delivering"]]
    well = stages[-1]
    for number, reason in enumerate(["NotEnoughRelays", "Starting", "PartitionsWithoutOwner"]):
        assert [item.reason for item in condition_events(well, stages[number])] == [reason]
        assert [item.reason for item in condition_events(stages[number], well)] == ["Delivering"]


def test_a_start_that_takes_too_long_is_an_event():
    for answers, reason in (((), "NotEnoughRelays"), ((Answer(pod("a"), None, "no route"),), "Starting")):
        stage = subscription_status(replace(FACTS, answers=answers), NOW)["conditions"]
        assert overdue(stage, NOW + timedelta(seconds=119)) == []
        (item,) = overdue(stage, NOW + timedelta(seconds=120))
        assert (item.warning, item.reason) == (True, reason)
    assert overdue(subscription_status(FACTS, NOW)["conditions"], NOW + timedelta(days=1)) == []


def test_a_pod_status_of_kubernetes_replaces_a_connection_error():
    killed = Answer(pod("a", problem="was killed (OOMKilled)"), None, "can't be connected to")
    for answers, message in (
        ((killed,), "No relay has reported yet: a was killed (OOMKilled)."),
        ((replace(killed, silent=True),), "Relays do not answer (a: was killed (OOMKilled))."),
    ):
        (ready, *_) = subscription_status(replace(FACTS, answers=answers), NOW)["conditions"]
        assert ready["message"].startswith(message)
        assert "NetworkPolicy" not in ready["message"]


# ---- the relay ----------------------------------------------------------------------------------------------------


def relay(**spec):
    return OutboxRelay.model_validate(outbox_relay(**spec))


REFUSES = Answer(pod("a"), process_status({"relays": [], "config": {"error": "spec.urgency: no such field"}}))
"""A relay that never had a valid configuration."""


@dataclass(frozen=True)
class RelayFacts:
    before: Any = field(default_factory=dict)
    relay: Any = field(default_factory=relay)
    problem: str = ""
    blocker: Any = None
    uncreated: str = ""
    halted: str = ""
    pods: Any = (pod("a"), pod("b"))
    answers: Any = BOTH


RELAY_FACTS = RelayFacts()


def relay_status(facts, now):
    failures = (("ReplicaFailure", "True", facts.uncreated), ("Progressing", "False", facts.halted))
    failed = [{"type": kind, "status": status, "message": message} for kind, status, message in failures if message]
    found = {"metadata": {"generation": 1}, "status": facts.before}
    observed = Observation(("shop", "orders"), found, facts.relay, facts.problem, None, (), facts.pods, facts.answers)
    return status_of_relay(observed, facts.blocker, {"status": {"conditions": failed}}, now)


@pytest.mark.parametrize(
    ("changes", "ready"),
    [
        ({}, ("True", "Available")),
        ({"relay": None, "problem": "spec: no"}, ("False", "InvalidSpec")),
        ({"blocker": Blocker(Reason.NAME_TAKEN, "Service x exists")}, ("False", "NameTaken")),
        ({"relay": relay(replicas=0), "pods": (), "answers": ()}, ("True", "Available")),
        ({"pods": (), "answers": ()}, ("False", "Starting")),
        ({"relay": relay(runtime="Sidecar"), "pods": (), "answers": ()}, ("False", "NotEnoughRelays")),
        ({"answers": (Answer(pod("a"), None, "away"), Answer(pod("b"), None, "away"))}, ("False", "Starting")),
        ({"pods": (pod("a"), pod("b", ready=False))}, ("False", "NotEnoughRelays")),
        ({"pods": (pod("a"), pod("b", terminating=True))}, ("False", "NotEnoughRelays")),
        ({"pods": (pod("a"), pod("b"), pod("new", ready=False))}, ("True", "Available")),
        ({"pods": (pod("a"), pod("b"), pod("new", ready=False)), "halted": "timed out"}, ("False", "NotEnoughRelays")),
        ({"relay": relay(runtime="Sidecar"), "halted": "timed out"}, ("True", "Available")),
        ({"relay": relay(replicas=0), "pods": (), "answers": (), "halted": "timed out"}, ("True", "Available")),
        ({"answers": (answer(config={"error": "too new"}),)}, ("False", "InvalidSpec")),
        ({"answers": (REFUSES, REFUSES)}, ("False", "InvalidSpec")),
        (
            {
                "answers": (
                    answer(
                        relay={
                            "databaseReachable": False,
                            "message": "run mailboat rebase",
                            "reason": "ForeignDatabase",
                        }
                    ),
                )
            },
            ("False", "ForeignDatabase"),
        ),
        (
            {"answers": (answer(relay=NO_TABLES),)},
            ("False", "SchemaMismatch"),
        ),
        (
            {"answers": (answer(relay={"schemaReady": False, "message": "table is missing"}),)},
            ("False", "SchemaMismatch"),
        ),
        ({"answers": (answer(relay={"partitionsAheadDays": 2.0}),)}, ("True", "Available")),
    ],
)
def test_ready_condition_of_a_relay(changes, ready):
    status = relay_status(replace(RELAY_FACTS, **changes), NOW)
    assert conditions(status)["Ready"] == ready
    assert "orders" in OutboxRelayStatus.model_validate(status).selector


STARTS = {"databaseReachable": False, "schemaReady": False, "message": "has not connected yet", "reason": "Starting"}


def test_a_healthy_start_of_a_relay_is_one_event():
    stages = [
        relay_status(replace(RELAY_FACTS, answers=answers), NOW)["conditions"]
        for answers in ((answer("a", relay=STARTS), answer("b", relay=STARTS)), BOTH)
    ]
    events = [condition_events(before, after) for before, after in itertools.pairwise([(), *stages])]
    assert [[item.reason for item in items] for items in events] == [[], ["Available"]]


@pytest.mark.parametrize("reason", ["DatabaseUnreachable", "InvalidSpec"])
def test_a_wrong_url_is_reported_with_the_source_of_the_url(reason):
    fields = {**STARTS, "message": "no such host", "reason": reason}
    facts = replace(RELAY_FACTS, relay=relay(), answers=(answer(relay=fields),))
    (ready, *_) = relay_status(facts, NOW)["conditions"]
    assert ready["reason"] == reason
    assert 'key "url" of Secret "orders-db"' in ready["message"]


def test_another_database_is_an_event():
    first = relay_status(replace(RELAY_FACTS, answers=(answer(relay={"database": "shop (system 1)"}),)), NOW)
    unreachable = relay_status(replace(RELAY_FACTS, before=first, answers=(answer(relay=STARTS),)), NOW)
    other = (answer(relay={"database": "shop (system 2)"}),)
    second = relay_status(replace(RELAY_FACTS, before=unreachable, answers=other), NOW)
    assert database_changed(first, unreachable) == database_changed({}, first) == []
    (item,) = database_changed(unreachable, second)
    assert (item.warning, item.reason) == (True, "DatabaseChanged")
    assert "shop (system 2), before it was shop (system 1)" in item.message


def test_missing_roles_are_reported_with_the_sql_for_an_administrator():
    facts = replace(RELAY_FACTS, answers=(answer(relay={"missingRoles": "create role mailboat_writer nologin;"}),))
    status = relay_status(facts, NOW)
    assert conditions(status)["SchemaReady"] == ("True", "RolesMissing")
    (condition,) = (each for each in status["conditions"] if each["type"] == "SchemaReady")
    assert "create role mailboat_writer nologin;" in condition["message"]


def test_a_relay_that_misses_tables_has_reached_the_database():
    found = conditions(relay_status(replace(RELAY_FACTS, answers=(answer(relay=NO_TABLES),)), NOW))
    assert found["DatabaseReachable"] == ("True", "Reachable")
    assert found["SchemaReady"] == ("False", "SchemaMismatch")


def test_kubectl_prints_ready_and_desired_replicas():
    facts = replace(RELAY_FACTS, pods=(pod("a"), pod("b", ready=False)))
    assert relay_status(facts, NOW)["replicasDisplay"] == "1/2"
    sidecars = replace(facts, relay=relay(runtime="Sidecar"), pods=(pod("a", own=False),), answers=(answer("a"),))
    assert relay_status(sidecars, NOW)["replicasDisplay"] == "1/1"


def test_partitions_that_run_out_and_retention_that_waits_are_conditions_of_their_own():
    fields = {"partitionsAheadDays": 2.0, "retentionBlocked": "shop/out has not delivered"}
    found = conditions(relay_status(replace(RELAY_FACTS, answers=(answer(relay=fields),)), NOW))
    assert found["SchemaReady"] == ("False", "PartitionsRunOut")
    assert found["RetentionBlocked"] == ("True", "UndeliveredEvents")


def test_an_old_snapshot_is_a_condition_that_names_its_holder():
    fields = {"oldSnapshot": "A snapshot is held since 10:00, by process 7. End it: select pg_terminate_backend(7)"}
    status = relay_status(replace(RELAY_FACTS, answers=(answer(relay=fields),)), NOW)
    assert conditions(status)["SnapshotHeld"] == ("True", "OldSnapshot")
    (condition,) = (each for each in status["conditions"] if each["type"] == "SnapshotHeld")
    assert condition["message"] == fields["oldSnapshot"]
    well = conditions(relay_status(replace(RELAY_FACTS, answers=(answer(),)), NOW))
    assert well["SnapshotHeld"] == ("False", "NothingBlocked")


def test_the_reason_that_time_partitions_run_out_is_reported():
    fields = {"partitionsAheadDays": 2.0, "message": "Upkeep of the outbox failed: a table is in the way"}
    status = relay_status(replace(RELAY_FACTS, answers=(answer(relay=fields),)), NOW)
    (condition,) = (each for each in status["conditions"] if each["type"] == "SchemaReady")
    assert "without them writes fail. Upkeep of the outbox failed: a table is in the way" in condition["message"]


def test_pods_that_ask_for_a_sidecar_and_have_none_are_named():
    pods = (
        pod("with", own=False),
        pod("without", own=False, has_relay=False),
        pod("not-wanted", own=False, has_relay=False, opted_out=True),
        pod("done", own=False, has_relay=False, finished=True),
    )
    facts = replace(RELAY_FACTS, relay=relay(runtime="Sidecar"), pods=pods, answers=(answer("with"),))
    status = relay_status(facts, NOW)
    (condition,) = (each for each in status["conditions"] if each["type"] == "SidecarsInjected")
    assert (condition["status"], "restart without. If" in condition["message"]) == ("False", True)
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)


# ---- reports and counters -----------------------------------------------------------------------------------------


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_response_of_a_pod_is_a_report_or_none(document):
    read = read_process_status(json.dumps(document).encode())
    assert read is None or isinstance(read, ProcessStatus)


def test_a_report_of_another_version_is_read_as_far_as_it_goes():
    document = {"relays": [{"name": RELAY, "news": 1, "subscriptions": [{"name": NAME}]}], "more": {}}
    report = read_process_status(json.dumps(document).encode())
    assert report is not None
    (relay,) = report.relays
    assert [each.state for each in relay.subscriptions] == ["Running"]


def test_no_more_of_a_report_is_kept_than_the_resources_name():
    """A pod that poses as a relay may report arbitrary data."""
    long, partitions = "x" * 100_000, [owned(number) for number in range(5000)]
    owners = {number: "a" * number for number in range(5000)}
    said = [{"name": name, "owned": partitions, "owners": owners, "lastError": long} for name in (NAME, NAME, "shop/b")]
    whole = [{"name": name, "message": long, "subscriptions": said} for name in (RELAY, RELAY, "shop/x")]
    report = process_status({"relays": whole, "config": {"error": long}, "more": [long]})
    kept = bounded(report, RELAY, {NAME: 2})
    assert len(json.dumps(as_json(kept))) < 5000
    ((found,),) = ([(each.owned, each.owners) for each in relay.subscriptions] for relay in kept.relays)
    assert found == (tuple(report.relays[0].subscriptions[0].owned[:2]), {0: "", 1: "a"})


def test_the_lag_of_a_silent_relay_still_counts():
    both = (answer("a", [owned(0, lag=70)]), answer("b", [owned(1, lag=64)]))
    before = subscription_status(replace(FACTS, answers=both), NOW)
    hangs = (answer("a", [owned(0, lag=10)], owners={"0": "shop/a", "1": "shop/b"}), Answer(pod("b"), None, "slow"))
    status = subscription_status(replace(FACTS, answers=hangs, before=before), NOW)
    assert (status["lag"], status["lagDisplay"]) == (74, "74+")
    assert [(each["pod"], each["lag"]) for each in status["partitions"]] == [("a", 10), ("b", 64)]
    unowned = (answer("a", [owned(0, lag=0)], owners={"0": "shop/a", "1": None}),)
    status = subscription_status(replace(FACTS, answers=unowned, before=status), NOW)
    assert (status["lag"], status["partitions"][1]["pod"]) == (64, "")
    taken = (answer("a", [owned(0), owned(1, lag=3)]),)
    assert subscription_status(replace(FACTS, answers=taken, before=status), NOW)["lag"] == 3


def test_events_are_counted_over_restarts_of_consumers_and_operators():
    tally, asked = RestartTotal(0), {"a": second(1), "b": second(1)}
    assert tally.count({"a": 10}, asked) == 10
    assert tally.count({"a": 15}, asked) == 15
    assert tally.count({"a": 2}, asked) == 17, "a new process"
    assert tally.count({"a": 2, "b": 5}, asked) == 22, "one that was silent until now"
    later = RestartTotal(22)
    assert later.count({"a": 2}, asked) == 22, "may be counted already"
    assert later.count({"a": 3, "b": 6}, asked) == 23, "so may what one had that was silent at first"
    assert later.count({"a": 3, "b": 6, "c": 4}, {**asked, "c": second(2)}) == 27, "a new pod"


def test_a_new_operator_counts_nothing_twice_however_young_the_pods_are():
    """Creation times of pods have a resolution of one second. Operators may follow one another faster."""
    one, next_one = RestartTotal(0), RestartTotal(100)
    assert one.count({"a": 100}, {"a": second(1)}) == 100
    assert next_one.count({"a": 100}, {"a": second(1)}) == 100
    assert next_one.count({"a": 130}, {"a": second(1)}) == 130


def test_pods_that_are_gone_are_forgotten_and_nothing_is_counted_twice():
    tally = RestartTotal(0)
    for number in range(100):
        pod = f"pod-{number}"
        assert tally.count({pod: 3}, {pod: second(number)}) == 3 * (number + 1)
    assert len(tally.last) == 1
    assert tally.count({}, {pod: second(99)}) == 300, "it does not answer at present"
    assert tally.count({pod: 5}, {pod: second(99)}) == 302
    assert tally.count({}, {}) == 302, "its label is taken off"
    assert tally.count({pod: 5}, {pod: second(99)}) == 302, "and put on again"
    assert tally.count({pod: 6}, {pod: second(99)}) == 303


def second(number: int) -> str:
    return f"2026-01-31T12:{number // 60:02}:{number % 60:02}Z"


def test_pods_that_lack_a_secret_are_named_in_the_same_words_on_both_kinds():
    lacking = [pod(f"shop-{number}", own=False, volumes=frozenset()) for number in range(7)]
    said = []
    for status in (
        subscription_status(replace(FACTS, lacking=lacking), NOW),
        relay_status(replace(RELAY_FACTS, pods=lacking), NOW),
    ):
        said += [each["message"] for each in status["conditions"] if each["type"] == "SecretsMounted"]
    assert said[0] == said[1]
    assert said[0].endswith("restart shop-0, shop-1, shop-2, shop-3, shop-4 and 2 more.")


def test_own_pods_without_a_secret_are_replaced_by_the_operator_only():
    lacking = [pod("orders-relay-a", volumes=frozenset())]
    for status in (
        subscription_status(replace(FACTS, lacking=lacking), NOW),
        relay_status(replace(RELAY_FACTS, pods=lacking), NOW),
    ):
        (mounted,) = (each for each in status["conditions"] if each["type"] == "SecretsMounted")
        assert (mounted["status"], mounted["reason"]) == ("False", "Progressing")
        assert "being replaced: orders-relay-a" in mounted["message"]
        assert "restart" not in mounted["message"]
        well = [{**mounted, "status": "True", "reason": "UpToDate"}]
        assert [item.warning for item in condition_events(well, [mounted])] == [False]


def test_the_reason_that_pods_do_not_start_is_reported_in_kubernetes_words():
    silent = (Answer(pod("a"), None, "has no address yet"),)
    for changes, message in (
        ({"pods": (), "answers": (), "uncreated": "pods is forbidden: exceeded quota"}, "exceeded quota"),
        ({"pods": (pod("a", problem="can't be scheduled (x)"),), "answers": silent}, "a can't be scheduled (x)"),
        ({"pods": (pod("a"), pod("b", ready=False, problem="the image x can't be pulled"))}, "b the image x can't"),
        (
            {"pods": (pod("a"), pod("b"), pod("c", ready=False, problem="can't start (x)")), "halted": "timed out."},
            "New relays do not become ready, the previous ones continue: c can't start (x).",
        ),
        (
            {"pods": (pod("a"), pod("b"), pod("c", ready=False)), "halted": "ReplicaSet x timed out."},
            "New relays do not become ready, the previous ones continue: ReplicaSet x timed out.",
        ),
    ):
        (ready,) = (
            each for each in relay_status(replace(RELAY_FACTS, **changes), NOW)["conditions"] if each["type"] == "Ready"
        )
        assert message in ready["message"]


def test_a_forbidden_request_is_a_warning():
    after = relay_status(replace(RELAY_FACTS, blocker=Blocker(Reason.FORBIDDEN, "exceeded quota")), NOW)["conditions"]
    assert [(item.warning, item.reason) for item in condition_events((), after) if "quota" in item.message] == [
        (True, "Forbidden")
    ]
    assert "Reconciling" not in {each["type"] for each in after}


def test_a_possible_network_policy_is_named_if_no_relay_answers():
    silent = (Answer(pod("a"), None, "did not answer in time"),)
    for status in (
        subscription_status(replace(FACTS, answers=silent), NOW),
        relay_status(replace(RELAY_FACTS, answers=silent), NOW),
    ):
        (ready,) = (each for each in status["conditions"] if each["type"] == "Ready")
        assert "NetworkPolicy" in ready["message"]


def test_no_password_in_a_relays_error_gets_into_a_status():
    spilled = "connection to postgresql://relay:hunter2@db/orders failed"
    answers = (answer("a", [owned(0), owned(1)], sinkReachable=False, lastError=spilled),)
    assert "hunter2" not in repr(subscription_status(replace(FACTS, answers=answers), NOW))
    unreachable = answer(relay={"databaseReachable": False, "message": spilled})
    status = relay_status(replace(RELAY_FACTS, answers=(unreachable,)), NOW)
    assert "hunter2" not in repr(status)
    assert "failed" in repr(status)
