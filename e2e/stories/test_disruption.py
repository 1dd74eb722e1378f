"""Story 4: under load, every part is killed, alone and in pairs, for minutes.

Afterwards each test checks the guarantee of docs/guarantees.md that its docstring names.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from chaos import ApiServer, Containers, LeadingOperator, Target, least_often_killed
from helm_release import NAMESPACE, Installed
from lock_waits import sessions, waits_behind
from namespace import StoryNamespace
from support.wait import wait_until

LEAST_SECONDS = 3 * 60
MOST_SECONDS = 15 * 60
"""Limit for a part that hangs, since pytest has no time limit for a fixture."""
CONFIGURATION = "MutatingWebhookConfiguration"
REPORTING_COMPONENT = "mailboat-operator"
"""Reporting component of the operator's events."""
RELAY, OPERATOR, POSTGRES, KAFKA, API = "a relay", "the operators", "Postgres", "Kafka", "the API server"
ALL_RELAYS, LEADER = "all relays", "the leading operator"
ROUNDS: list[tuple[str, ...]] = [
    *((name,) for name in (RELAY, ALL_RELAYS, LEADER, OPERATOR, POSTGRES, KAFKA, API)),
    *itertools.combinations((RELAY, OPERATOR, POSTGRES, KAFKA, API), 2),
]


@dataclass(frozen=True, slots=True)
class Disruption:
    """Records of the kills and the proofs of delivery."""

    story: StoryNamespace
    killed: Counter[str]
    rounds: list[str]
    """Parts killed together, and the seconds until recovery."""
    shop: dict[str, Any]
    """The shop's report."""
    proof: dict[str, Any]
    after_one: dict[str, Any]
    """The proof after the first round, in which one relay was killed. Some events are still in flight."""


@pytest.fixture(scope="module")
def disruption(story: StoryNamespace, mailboat: Installed) -> Disruption:
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    targets: dict[str, Target] = {
        RELAY: Containers(story, story.relay_pods, "mailboat-relay", pick=least_often_killed),
        ALL_RELAYS: Containers(story, story.relay_pods, "mailboat-relay"),
        LEADER: LeadingOperator(story, mailboat),
        OPERATOR: Containers(story, mailboat.operators, "operator"),
        POSTGRES: Containers(story, lambda: [story.get("pod", "postgres-0")], "postgres"),
        KAFKA: Containers(story, lambda: [story.get("pod", "kafka-0")], "kafka"),
        API: ApiServer(story.cluster),
    }
    killed: Counter[str] = Counter()
    rounds: list[str] = []
    after_one: dict[str, Any] = {}
    with story.trading() as shop:
        start = time.monotonic()
        for number, names in enumerate(itertools.cycle(ROUNDS)):
            began = time.monotonic()
            if number >= len(ROUNDS) and began > start + LEAST_SECONDS:
                break
            if began > start + MOST_SECONDS:
                pytest.fail(f"no round of {' and '.join(names)} within {MOST_SECONDS} s: {', '.join(rounds)}")
            kill_together(story, {name: targets[name] for name in names}, killed)
            rounds.append(f"{' and '.join(names)} {time.monotonic() - began:.0f} s")
            if number == 0:
                after_one = wait_until(lambda: story.proof("orders") or {}, 120, "the proof after one kill")
    story.until_lag("orders-to-kafka", timeout=180)
    story.until_ready("orders-to-kafka", timeout=120)
    story.until_ready("orders", kind="outboxrelay", timeout=120)
    return Disruption(story, killed, rounds, shop, story.audit("orders"), after_one)


def kill_together(story: StoryNamespace, targets: dict[str, Target], killed: Counter[str]) -> None:
    """Kill parts at once; return when they are up and newly committed events arrive."""
    for target in targets.values():
        target.until_up()
    # The API server last, since it lists the others.
    for name in sorted(targets, key=lambda each: each == API):
        killed[name] += targets[name].kill()
    story.cluster.until_api_answers()
    for target in targets.values():
        target.until_up()
    killed_names = " and ".join(targets)
    # A ready broker may still recover its log.
    before = wait_until(
        story.arrived, 180, f"Kafka to answer after a kill of {killed_names}", met=lambda count: count is not None
    )
    wait_until(
        story.arrived, 240, f"events after a kill of {killed_names}", met=lambda count: (count or 0) > (before or 0)
    )


def test_every_committed_event_arrived_in_order_and_no_other(disruption: Disruption, record_property: Any) -> None:
    """G1, G2, G3."""
    record_property("killed", ", ".join(f"{name} {times} times" for name, times in disruption.killed.items()))
    record_property("rounds", ", ".join(disruption.rounds))
    record_property("proof", str(disruption.proof))
    assert (disruption.proof["lost"], disruption.proof["out_of_order"], disruption.proof["uncommitted"]) == (0, 0, 0)
    assert disruption.proof["written"] >= disruption.shop["committed"] > LEAST_SECONDS * 10, "no load"


def test_an_outage_costs_no_attempt(disruption: Disruption) -> None:
    """G4."""
    assert disruption.proof["attempts"] == 1
    count = "select (select count(*) from mailboat.parked), (select count(*) from mailboat.dead_letters)"
    assert disruption.story.in_postgres(count, "shop").strip() == "0|0"


def test_copies_equal_their_originals_and_no_sequence_number_is_used_twice_or_left_out(disruption: Disruption) -> None:
    """G5, G9."""
    assert disruption.proof["changed_copies"] == 0
    assert ROUNDS[0] == (RELAY,)
    assert disruption.after_one["copies_out_of_order"] == 0, f"copies of a key are out of order: {disruption.after_one}"
    assert (disruption.proof["numbers_twice"], disruption.proof["numbers_left_out"]) == (0, 0)


def test_no_writer_failed_or_waited_for_a_lock_of_a_relay(disruption: Disruption, record_property: Any) -> None:
    """G10. ``StoryNamespace.trading`` checks errors and durations of the writers after every load."""
    record_property("shop", str(disruption.shop))
    assert disruption.shop["errors"] == []
    log = disruption.story.kubectl("exec", "statefulset/postgres", "--", "cat", "/data/postgres.log").splitlines()
    applications = {name.partition(" ")[0] for name in sessions(log)}
    assert applications >= {"mailboat", "shop"}, "without application names in the log no wait would be found"
    assert list(waits_behind("mailboat", "shop", log)) == []


def test_an_idle_system_writes_nothing(disruption: Disruption) -> None:
    """G8: heartbeats aside, neither to Postgres nor to the API server."""
    story = disruption.story
    story.until_lag("orders-to-kafka")
    wait_until(lambda: rates(story), 120, "a rate of 0", met=lambda now: now == {0.0})
    # A change of counters alone is written once a minute. A change of state writes them at once.
    for state in ("Paused", "Running"):
        story.set_state("orders-to-kafka", state)
    story.until_status("orders-to-kafka", "rate", 0, timeout=120)
    idle = "select bool_and(active) from mailboat.wakeup_requests"
    wait_until(lambda: story.in_postgres(idle, "shop").strip() == "t", 180, "idle relays")
    until_heartbeats(story, 10)  # until all sessions have flushed their statistics
    tables, resources = written_rows(story), resource_versions(story)
    assert {each.partition("/")[0] for each in resources} >= {"EventSubscription", "Secret", CONFIGURATION}
    until_heartbeats(story, 20)  # ten seconds of two relays, five status intervals of the operator
    assert resource_versions(story) == resources
    assert {**written_rows(story), "relays": 0} == {**tables, "relays": 0}


def rates(story: StoryNamespace) -> set[float]:
    """Events per second, as reported by the relays."""
    reports = [report for pod in story.relay_pods() for report in story.relays_in(pod["metadata"]["name"])]
    return {each["rate"] for report in reports for each in report["subscriptions"]}


def until_heartbeats(story: StoryNamespace, count: int) -> None:
    """Wait for a number of heartbeats, the only writes of idle relays."""
    before = written_rows(story)["relays"]
    wait_until(lambda: written_rows(story)["relays"], 120, f"{count} heartbeats", met=lambda now: now >= before + count)


def written_rows(story: StoryNamespace) -> dict[str, int]:
    """Rows written so far, by table."""
    count = "n_tup_ins + n_tup_upd + n_tup_del"
    tables = story.in_postgres(
        f"select relname, {count} from pg_stat_user_tables where schemaname = 'mailboat'", "shop"
    )
    return {name: int(rows) for name, _, rows in (line.partition("|") for line in tables.split())}


def resource_versions(story: StoryNamespace) -> list[str]:
    """Resource versions of all objects that the operator writes.

    They are both resources, their children, the operator's events, its Secrets and the webhook's configuration.
    """
    kinds = "outboxrelays,eventsubscriptions,deployments,configmaps,services,serviceaccounts,poddisruptionbudgets"
    own = f"secrets,configmaps,{CONFIGURATION.lower()}s"
    each = "{range .items[*]}{.kind}/{.metadata.name} {.metadata.resourceVersion}{'\\n'}{end}"
    events = [each["metadata"] for each in story.all("events") if each.get("reportingComponent") == REPORTING_COMPONENT]
    return [
        *story.kubectl("get", kinds, f"--output=jsonpath={each}").splitlines(),
        *story.cluster.kubectl("--namespace", NAMESPACE, "get", own, f"--output=jsonpath={each}").splitlines(),
        *(f"Event/{event['name']} {event['resourceVersion']}" for event in events),
    ]
