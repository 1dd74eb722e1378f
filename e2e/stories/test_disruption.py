"""Story 4: everything dies, one after the other and in pairs, for minutes, while events flow.

Then every guarantee of docs/guarantees.md is looked at, one by one: each test has its number.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from chaos import ApiServer, Containers, LeadingOperator, Victim, least_often_killed
from dead_letters import mailboat as mailboat_says
from dead_letters import mend_topic, write_poison
from helm_release import NAMESPACE, Installed
from lock_waits import sessions, waits_behind
from namespace import Stage, wrong_in
from support.wait import wait_until

MINUTES = 3 * 60
ENOUGH = 15 * 60
"""Seconds. No storm on any machine lasts longer, unless something hangs: a fixture has no time limit but its own."""
CONFIGURATION = "MutatingWebhookConfiguration"
OPERATOR_SAYS = "mailboat-operator"
"""By whom its events are reported."""
RELAY, OPERATOR, POSTGRES, KAFKA, API = "a relay", "the operators", "Postgres", "Kafka", "the API server"
ALL_RELAYS, LEADER = "all relays", "the leading operator"
ROUNDS: list[tuple[str, ...]] = [
    *((name,) for name in (RELAY, ALL_RELAYS, LEADER, OPERATOR, POSTGRES, KAFKA, API)),
    *itertools.combinations((RELAY, OPERATOR, POSTGRES, KAFKA, API), 2),
]


@dataclass(frozen=True, slots=True)
class Storm:
    """What is known when it is over."""

    stage: Stage
    killed: Counter[str]
    rounds: list[str]
    """Who died together, and after how long all was well again."""
    shop: dict[str, Any]
    """The shop's report."""
    proof: dict[str, Any]
    after_one: dict[str, Any]
    """The proof as it was after the first round, in which one relay died: much was under way still."""


@pytest.fixture(scope="module")
def storm(stage: Stage, mailboat: Installed) -> Storm:
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    victims: dict[str, Victim] = {
        RELAY: Containers(stage, stage.relay_pods, "mailboat-relay", pick=least_often_killed),
        ALL_RELAYS: Containers(stage, stage.relay_pods, "mailboat-relay"),
        LEADER: LeadingOperator(stage, mailboat),
        OPERATOR: Containers(stage, mailboat.operators, "operator"),
        POSTGRES: Containers(stage, lambda: [stage.get("pod", "postgres-0")], "postgres"),
        KAFKA: Containers(stage, lambda: [stage.get("pod", "kafka-0")], "kafka"),
        API: ApiServer(stage.cluster),
    }
    killed: Counter[str] = Counter()
    rounds: list[str] = []
    after_one: dict[str, Any] = {}
    with stage.trading() as shop:
        start = time.monotonic()
        calm, enough = start + MINUTES, start + ENOUGH
        for number, names in enumerate(itertools.cycle(ROUNDS)):
            if number >= len(ROUNDS) and time.monotonic() > calm:
                break
            began = time.monotonic()
            if began > enough:
                pytest.fail(f"{ENOUGH} s, and the round of {' and '.join(names)} has yet to come: {', '.join(rounds)}")
            strike(stage, {name: victims[name] for name in names}, killed)
            rounds.append(f"{' and '.join(names)} {time.monotonic() - began:.0f} s")
            if number == 0:
                after_one = wait_until(lambda: stage.proof("orders") or {}, 120, "the proof after one death")
    stage.until_lag("orders-to-kafka", timeout=180)
    stage.until_ready("orders-to-kafka", timeout=120)
    stage.until_ready("orders", kind="outboxrelay", timeout=120)
    return Storm(stage, killed, rounds, shop, stage.audit("orders"), after_one)


def strike(stage: Stage, victims: dict[str, Victim], killed: Counter[str]) -> None:
    """Kill them at once; return when they are back and what is written since then arrives."""
    for victim in victims.values():
        victim.until_up()
    # The API server last: the others are found through it.
    for name in sorted(victims, key=lambda each: each == API):
        killed[name] += victims[name].kill()
    stage.cluster.until_api_answers()
    for victim in victims.values():
        victim.until_up()
    who = " and ".join(victims)
    # A broker that is ready may still be busy with what it finds on its disk.
    before = wait_until(stage.arrived, 180, f"Kafka to answer after {who} died", met=lambda count: count is not None)
    wait_until(stage.arrived, 240, f"events to flow after {who} died", met=lambda count: (count or 0) > (before or 0))


def test_every_committed_event_arrived_in_order_and_no_other(storm: Storm, record_property: Any) -> None:
    """G1, G2, G3."""
    record_property("killed", ", ".join(f"{name} {times} times" for name, times in storm.killed.items()))
    record_property("rounds", ", ".join(storm.rounds))
    record_property("proof", str(storm.proof))
    assert (storm.proof["lost"], storm.proof["out_of_order"], storm.proof["uncommitted"]) == (0, 0, 0)
    assert storm.proof["written"] >= storm.shop["committed"] > MINUTES * 10, "there was a load all the while"


def test_no_event_paid_for_what_was_away(storm: Storm) -> None:
    """G4."""
    assert storm.proof["attempts"] == 1
    count = "select (select count(*) from mailboat.parked), (select count(*) from mailboat.dead_letters)"
    assert storm.stage.in_postgres(count, "shop").strip() == "0|0"


def test_no_relay_settled_what_another_had_taken_over_and_all_copies_are_true(storm: Storm) -> None:
    """G5, G9."""
    assert storm.proof["changed_copies"] == 0
    assert ROUNDS[0] == (RELAY,)
    assert storm.after_one["copies_out_of_order"] == 0, f"what followed an event follows its copy: {storm.after_one}"
    assert (storm.proof["numbers_twice"], storm.proof["numbers_left_out"]) == (0, 0)


def test_the_shop_noticed_nothing_but_the_absence_of_its_database(storm: Storm, record_property: Any) -> None:
    """G10; that nothing failed and nothing was slow is checked whenever a shop closes (``Stage.trading``)."""
    record_property("shop", str(storm.shop))
    assert storm.shop["complaints"] == []
    log = storm.stage.kubectl("exec", "statefulset/postgres", "--", "cat", "/data/postgres.log").splitlines()
    who = {name.partition(" ")[0] for name in sessions(log)}
    assert who >= {"mailboat", "shop"}, "the log says who is who: else nobody would be found in it"
    assert list(waits_behind("mailboat", "shop", log)) == []


def test_lag_is_what_waits_to_the_last_event(storm: Storm) -> None:
    """G7, with a number that the status does not round."""
    stage = storm.stage
    stage.set_state("orders-to-kafka", "Paused")
    stage.shop("change", "order-1", "--count", "57")
    stage.until_lag("orders-to-kafka", 57, timeout=120)
    stage.set_state("orders-to-kafka", "Running")
    stage.until_lag("orders-to-kafka")


def test_a_dead_letter_can_be_brought_back(storm: Storm) -> None:
    """G6."""
    stage = storm.stage
    write_poison(stage, "order-7")
    stage.until_status("orders-to-kafka", "dead", 1)
    mend_topic(stage)
    assert mailboat_says(stage, "dlq", "replay", "--key", "order-7") == "1 dead letter replayed\n"
    stage.until_status("orders-to-kafka", "dead", 0)
    proof = stage.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["numbers_left_out"] == 0, "it came back under its own number"


def test_when_nothing_happens_nothing_is_written(storm: Storm) -> None:
    """G8: heartbeats aside, neither to Postgres nor to the API server."""
    stage = storm.stage
    stage.until_lag("orders-to-kafka")
    wait_until(lambda: rates(stage), 120, "nothing to be under way", met=lambda now: now == {0.0})
    # Counters alone are written once a minute. What is written for another reason brings them along.
    for state in ("Paused", "Running"):
        stage.set_state("orders-to-kafka", state)
    stage.until_status("orders-to-kafka", "rate", 0, timeout=120)
    asleep = "select bool_and(active) from mailboat.wakeup_requests"
    wait_until(lambda: stage.in_postgres(asleep, "shop").strip() == "t", 180, "the relays to go to sleep")
    until_heartbeats(stage, 10)  # and until sessions have told the statistics what they did before
    tables, resources = written_rows(stage), resource_versions(stage)
    assert {each.partition("/")[0] for each in resources} >= {"EventSubscription", "Secret", CONFIGURATION}
    until_heartbeats(stage, 20)  # ten seconds of two relays: five looks of the operator
    assert resource_versions(stage) == resources
    assert {**written_rows(stage), "relays": 0} == {**tables, "relays": 0}


def rates(stage: Stage) -> set[float]:
    """Events a second, by the relays' own word."""
    reports = [report for pod in stage.relay_pods() for report in stage.relays_in(pod["metadata"]["name"])]
    return {each["rate"] for report in reports for each in report["subscriptions"]}


def until_heartbeats(stage: Stage, count: int) -> None:
    """Until the relays have written so many: the clock of those who have nothing to do."""
    before = written_rows(stage)["relays"]
    wait_until(lambda: written_rows(stage)["relays"], 120, f"{count} heartbeats", met=lambda now: now >= before + count)


def written_rows(stage: Stage) -> dict[str, int]:
    """Rows written so far, by table."""
    count = "n_tup_ins + n_tup_upd + n_tup_del"
    tables = stage.in_postgres(
        f"select relname, {count} from pg_stat_user_tables where schemaname = 'mailboat'", "shop"
    )
    return {name: int(rows) for name, _, rows in (line.partition("|") for line in tables.split())}


def resource_versions(stage: Stage) -> list[str]:
    """Of both resources, of all that the operator made for them, and of the events in which it told of them.

    And of what it keeps for itself: its certificates and keys, and the webhook's configuration.
    """
    kinds = "outboxrelays,eventsubscriptions,deployments,configmaps,services,serviceaccounts,poddisruptionbudgets"
    own = f"secrets,configmaps,{CONFIGURATION.lower()}s"
    each = "{range .items[*]}{.kind}/{.metadata.name} {.metadata.resourceVersion}{'\\n'}{end}"
    told = [event["metadata"] for event in stage.all("events") if event.get("reportingComponent") == OPERATOR_SAYS]
    return [
        *stage.kubectl("get", kinds, f"--output=jsonpath={each}").splitlines(),
        *stage.cluster.kubectl("--namespace", NAMESPACE, "get", own, f"--output=jsonpath={each}").splitlines(),
        *(f"Event/{event['name']} {event['resourceVersion']}" for event in told),
    ]
