"""Pure functions of delivery: backoff, poll interval, ownership, outcomes, merging, routing."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mailboat.delivery.backoff import Backoff
from mailboat.delivery.poll_interval import LINGER, PollInterval, WakeSettings
from mailboat.delivery.progress import merged
from mailboat.delivery.rebalance import decide, orphans, targets
from mailboat.delivery.redelivery import Attempt, Outcome, evaluate, set_aside
from mailboat.delivery.stream import StreamSettings
from mailboat.errors import DatabaseUnavailable, DeliveryError, EventRefused, LeaseLost, SinkUnavailable, Undecided
from mailboat.model import OutboxEvent
from mailboat.runtime.session import _primary_error
from mailboat.store.outbox_store import (
    CursorKey,
    Dead,
    LastFailure,
    Lease,
    Membership,
    Park,
    PartitionOwner,
    RelayPeer,
    Settlement,
    Subscription,
)
from mailboat.store.queries import fan_out, fan_out_single


def event(id: int, key: str | None = None, slot: int | None = None) -> OutboxEvent:
    number = f"00000000-0000-4000-8000-{id:012d}"
    return OutboxEvent(id, number, "t", None, None, key, b"", "application/json", None, "{}", None, "", slot or id)


# -- retry -----------------------------------------------------------------------------------------------------------


@given(
    failures=st.integers(1, 100_000),
    initial=st.floats(0.001, 10),
    factor=st.floats(1, 10),
    ceiling=st.floats(0.001, 3600),
    jitter=st.floats(0, 1),
    seed=st.integers(),
)
def test_back_off_stays_within_its_ceiling_and_never_overflows(
    failures: int, initial: float, factor: float, ceiling: float, jitter: float, seed: int
) -> None:
    delay = Backoff(initial, factor, ceiling, jitter).delay(failures, Random(seed))
    assert 0 <= delay <= ceiling * (1 + jitter) * 1.000001


def test_back_off_doubles_up_to_its_ceiling() -> None:
    backoff = Backoff(1.0, 2.0, 10.0, 0.0)
    assert [backoff.delay(n, Random()) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize(
    ("attempts", "retryable", "exhausted"),
    [(1, True, False), (2, True, False), (3, True, True), (4, True, True), (1, False, True)],
)
def test_attempts_end_at_the_limit_or_at_once(attempts: int, retryable: bool, exhausted: bool) -> None:
    settings = StreamSettings(1, 1.0, 3, Backoff(1, 2, 10, 0), dead_letters=True)
    assert settings.exhausted(attempts, retryable) is exhausted


def test_a_recovered_outage_has_no_delay() -> None:
    assert Backoff(1.0, 2.0, 10.0, 0.0).delay(0, Random()) == 0


# -- poll interval ---------------------------------------------------------------------------------------------------


def test_the_poll_interval_grows_while_no_events_arrive() -> None:
    poll_interval = PollInterval(WakeSettings(poll=0.5, idle_after=3, longest=4.0)).quiet(10.0)
    assert not poll_interval.should_idle(10.0 + LINGER / 2)
    assert poll_interval.should_idle(10.0 + LINGER)
    idle = poll_interval.idled()
    waits = []
    for _ in range(9):
        waits.append(idle.wait(0.0))
        idle = idle.still_idle(undecided_writers=False)
    assert waits == [0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert idle.found(20.0).wait(0.0) == 0
    assert idle.due().wait(0.0) == 0


def test_polls_stay_frequent_while_a_writer_may_have_missed_the_wakeup_request() -> None:
    idle = PollInterval(WakeSettings(poll=0.5, idle_after=0, longest=60.0)).quiet(0.0).idled()
    for _ in range(100):
        idle = idle.still_idle(undecided_writers=True)
    assert idle.wait(0.0) == 0.5


def test_a_relay_that_was_notified_is_idle_as_soon_as_nothing_comes() -> None:
    idle = PollInterval(WakeSettings(poll=0.5)).quiet(0.0).idled()
    assert idle.woken().wait(0.0) == 0
    assert idle.woken().found(10.0).quiet(10.01).wait(0.0) == 0.5


def test_a_relay_that_found_an_event_by_the_clock_does_not_rely_on_notifications() -> None:
    idle = PollInterval(WakeSettings(poll=0.5)).quiet(0.0).idled()
    for found in (idle, idle.woken().found(10.0).quiet(10.01)):
        assert found.found(10.5, by_clock=True).quiet(10.51).wait(0.0) < LINGER


@pytest.mark.parametrize(
    ("interval", "crowded"), [(0.001, True), (0.005, True), (0.01, False), (0.1, False), (10.0, False)]
)
def test_writers_notify_until_events_come_often(interval: float, crowded: bool) -> None:
    poll_interval, often = PollInterval(WakeSettings()).quiet(0.0).idled(), False
    for now in (100.0 + number * interval for number in range(100)):
        poll_interval = poll_interval.woken().found(now)
        often |= poll_interval.crowded(now)
        poll_interval = poll_interval.quiet(now)
    assert often is crowded
    assert not PollInterval(poll_interval.settings).crowded(200.0)


def test_writers_do_not_notify_a_relay_that_is_behind_however_slow_its_polls_are() -> None:
    poll_interval = PollInterval(WakeSettings()).quiet(0.0).idled().woken()
    assert not poll_interval.found(10.0).found(10.4).crowded(10.4)
    assert poll_interval.found(10.0).found(10.4).found(10.8).crowded(10.8)


@given(st.integers(0, 10_000))
def test_the_longest_wait_is_never_exceeded(polls: int) -> None:
    idle = PollInterval(WakeSettings(), quiet_since=0.0, idle=True, empty_polls=polls)
    assert idle.wait(1.0) <= WakeSettings().longest


# -- ownership -------------------------------------------------------------------------------------------------------


@st.composite
def memberships(draw: st.DrawFn) -> Membership:
    peers = tuple(
        RelayPeer(f"r{n}", frozenset(draw(st.sets(st.integers(1, 3)))), draw(st.booleans()))
        for n in range(draw(st.integers(1, 4)))
    )
    somebody = st.sampled_from([None, "gone", *(peer.id for peer in peers)])
    holdings = tuple(
        PartitionOwner(CursorKey(subscription, partition), draw(somebody), draw(somebody))
        for subscription in (1, 2, 3)
        for partition in range(draw(st.integers(0, 4)))
    )
    return Membership(peers, holdings, {})


@given(memberships())
def test_all_relays_compute_the_same_assignment_among_capable_relays(membership: Membership) -> None:
    wanted = targets(membership)
    serving = {peer.id: peer.serves for peer in membership.peers if peer.alive}
    for holding in membership.holdings:
        able = {relay for relay, serves in serving.items() if holding.key.subscription in serves}
        if holding.assigned_to in able:
            assert wanted[holding.key] == holding.assigned_to
        elif able:
            assert wanted[holding.key] in able
        else:
            assert holding.key not in wanted


@given(memberships())
@example(
    Membership(
        (
            RelayPeer("r1", frozenset({3}), True),
            RelayPeer("r2", frozenset({3}), True),
            RelayPeer("r3", frozenset(), True),
        ),
        tuple(PartitionOwner(CursorKey(3, number), owner, None) for number, owner in enumerate((None, "r2", "r3"))),
        {},
    )
)
def test_independent_decisions_agree_on_the_owners(membership: Membership) -> None:
    """If all relays decide on the same membership, no partition is claimed twice, and every relay gets its share.

    The shares may change at first, since an owner keeps its partitions, but they become stable.
    """
    alive = [peer.id for peer in membership.peers if peer.alive]
    owner = {h.key: h.owner for h in membership.holdings if h.owner in alive}
    for _ in range(5):
        claims: Counter[CursorKey] = Counter()
        now = Membership(
            membership.peers,
            tuple(PartitionOwner(h.key, owner.get(h.key), h.assigned_to) for h in membership.holdings),
            {},
        )
        for relay in alive:
            held = {key for key, who in owner.items() if who == relay}
            moves = decide(relay, now, held, {}, 0.0, 10.0)
            assert not moves.claim & held
            assert moves.release <= held
            claims.update(moves.claim)
            for key in moves.release:
                del owner[key]
            owner |= dict.fromkeys(moves.claim, relay)
        assert not claims or max(claims.values()) == 1
        wanted = targets(now)
    assert not claims, "at rest"
    assert {key: who for key, who in owner.items() if key in wanted} == wanted


def test_partitions_without_an_owner_are_claimed_after_the_grace_time() -> None:
    key = CursorKey(1, 0)
    peers = (RelayPeer("a", frozenset({1}), True), RelayPeer("b", frozenset({1}), True))
    membership = Membership(peers, (PartitionOwner(key, None, "b"),), {})
    assert not decide("a", membership, set(), {key: 0.0}, 9.0, 10.0).claim
    assert decide("a", membership, set(), {key: 0.0}, 11.0, 10.0).claim == {key}


def test_a_relay_claims_only_partitions_that_it_serves() -> None:
    key = CursorKey(2, 0)
    membership = Membership((RelayPeer("a", frozenset({1}), True),), (PartitionOwner(key, None, None),), {})
    assert not decide("a", membership, set(), {key: 0.0}, 100.0, 10.0).claim


def test_own_cursors_without_a_worker_are_claimed_again() -> None:
    key = CursorKey(1, 0)
    membership = Membership((RelayPeer("a", frozenset({1}), True),), (PartitionOwner(key, "a", None),), {})
    assert decide("a", membership, set(), {}, 0.0, 10.0).claim == {key}
    assert not decide("a", membership, {key}, {}, 0.0, 10.0).claim


def test_the_partitions_of_a_silent_relay_are_counted_by_one_other_that_serves_them() -> None:
    everything, held = frozenset({1, 2}), {0: "a", 1: "b", 2: None, 3: "gone"}
    peers = (
        RelayPeer("a", everything, alive=True, silent=True),
        RelayPeer("b", everything, alive=True),
        RelayPeer("c", everything, alive=True),
        RelayPeer("gone", everything, alive=False),
    )
    holdings = [PartitionOwner(CursorKey(number, p), owner, None) for number in (1, 2) for p, owner in held.items()]
    membership = Membership(peers, tuple(holdings), {})
    assert orphans(membership, "b", {1}) == {1: frozenset({0, 2, 3})}
    assert orphans(membership, "a", {1}) == orphans(membership, "c", {1}) == {}


# -- outcomes --------------------------------------------------------------------------------------------------------

ANSWERS = st.sampled_from(["delivered", "refused", "away", "undecided"])
_ERRORS: dict[str, DeliveryError] = {
    "refused": EventRefused("no"),
    "away": SinkUnavailable("gone"),
    "undecided": Undecided("?"),
}


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), ANSWERS), min_size=1, max_size=12), st.booleans())
def test_no_event_of_a_key_passes_a_refused_one(sent: list[tuple[str | None, str]], ordered: bool) -> None:
    items = [Attempt(event(n, key), n) for n, (key, _) in enumerate(sent, 1)]
    unavailable, one_by_one = evaluate(
        items, {n: _ERRORS[answer] for n, (_, answer) in enumerate(sent) if answer != "delivered"}
    )
    set_aside(items, (), ordered=ordered)
    before = [item.outcome for item in items]
    set_aside(items, (), ordered=ordered)
    assert [item.outcome for item in items] == before, "asking again changes nothing"
    refused: set[str] = set()
    for item, (key, answer) in zip(items, sent, strict=True):
        if answer == "delivered":
            assert item.outcome is Outcome.DELIVERED
        if key is not None and ordered and key in refused and answer != "delivered":
            assert item.outcome is Outcome.ASIDE
            assert item.refusal is None
        elif answer == "refused":
            assert item.outcome is Outcome.REFUSED
            refused |= {key} if key else set()
        elif answer in ("away", "undecided"):
            assert item.outcome is Outcome.PENDING
    if "away" in [answer for _, answer in sent]:
        assert unavailable is not None
        assert not one_by_one
    if any(item.outcome is Outcome.PENDING for item in items):
        assert unavailable or one_by_one or "refused" in [answer for _, answer in sent]


def test_events_of_a_parked_key_are_set_aside_unless_unordered() -> None:
    items = [Attempt(event(1, "a"), 1), Attempt(event(2, "b"), 2), Attempt(event(3), 3)]
    set_aside(items, {"a"}, ordered=False)
    assert {item.outcome for item in items} == {Outcome.PENDING}
    set_aside(items, {"a"})
    assert [item.outcome for item in items] == [Outcome.ASIDE, Outcome.PENDING, Outcome.PENDING]


def test_a_sink_without_a_result_for_a_message_counts_as_unavailable() -> None:
    (item,) = items = [Attempt(event(1), 1)]
    assert evaluate(items, {0: Undecided("?")})[0] is not None
    assert item.outcome is Outcome.PENDING


# -- merging ---------------------------------------------------------------------------------------------------------

LEASE = Lease(CursorKey(1, 0), "e")
FAILURE = LastFailure("Refused", "no")


def test_two_settlements_of_a_window_are_one_with_the_later_progress() -> None:
    first = Settlement(LEASE, "w", 10, 1, park=(Park(event(10), 1),))
    second = Settlement(LEASE, "w", 20, 3, closes=True, dead=(Dead(event(20), 3, 1, FAILURE),))
    both = merged(first, second)
    assert (both.window_snapshot, both.position, both.sequence, both.closes) == ("w", 20, 3, True)
    assert (len(both.park), len(both.dead)) == (1, 1)


@pytest.mark.parametrize("parked_first", [True, False])
def test_a_settlement_of_parked_events_only_leaves_progress_unchanged(parked_first: bool) -> None:
    progress = Settlement(LEASE, "w", 10, 1, closes=True)
    parked = Settlement(LEASE, None, unpark=(1,), park=(Park(event(2), 1, 1, None, FAILURE, ordinal=2),))
    both = merged(parked, progress) if parked_first else merged(progress, parked)
    assert (both.window_snapshot, both.position, both.sequence, both.closes) == ("w", 10, 1, True)
    assert (both.unpark, len(both.park)) == ((1,), 1)


def test_a_settlement_of_a_former_owner_is_dropped() -> None:
    stale = Settlement(Lease(CursorKey(1, 0), "old"), "w", 10, 1, park=(Park(event(10), 1),))
    fresh = Settlement(LEASE, "w", 5, 1)
    assert merged(stale, fresh) == fresh
    assert merged(None, fresh) == fresh


# -- routing ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.sets(st.sampled_from([1, 2]))), max_size=20),
    st.sets(st.tuples(st.sampled_from([1, 2]), st.integers(0, 4))),
)
def test_every_event_goes_to_the_matching_members_and_to_no_others(
    found: list[tuple[int, set[int]]], chosen: set[tuple[int, int]]
) -> None:
    subscriptions = {n: Subscription(n, f"s{n}", partitions, 1, False) for n, partitions in ((1, 3), (2, 5))}
    members = frozenset(CursorKey(*pair) for pair in chosen if pair[1] < subscriptions[pair[0]].partitions)
    rows = [(event(n, slot=slot), sorted(matching)) for n, (slot, matching) in enumerate(found, 1)]
    routed = fan_out(rows, subscriptions, members)
    expected = {
        key: [e for e, matching in rows if key.subscription in matching and e.slot % partitions == key.partition]
        for key in members
        if (partitions := subscriptions[key.subscription].partitions)
    }
    assert routed == {key: events for key, events in expected.items() if events}
    for number, known in subscriptions.items():
        alone = fan_out_single([e for e, matching in rows if number in matching], known, members)
        assert alone == {key: events for key, events in routed.items() if key.subscription == number}


# -- the end of a session --------------------------------------------------------------------------------------------


def test_of_several_errors_a_mailboat_error_ends_the_session_and_the_others_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = DatabaseUnavailable("no route to host")
    errors = ExceptionGroup(
        "all of them", [KeyError("x"), ExceptionGroup("", [away, KeyError("x"), LeaseLost("gone"), away])]
    )
    assert _primary_error(errors) is away
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["KeyError", "gone"]
    assert caplog.records[0].exc_info, "a bug is told with its traceback"
    assert _primary_error(ExceptionGroup("", [error := KeyError("y")])) is error
