"""The engine for broker sources, with a source and stores in memory: lanes, attempts, dead letters, drains."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat.consumer import Event, Ignore, Refuse, RetryLater
from mailboat.consumer.broker import claimer
from mailboat.consumer.broker.interfaces import Claim, ClaimReply, ClaimsUnavailable
from mailboat.consumer.broker.kafka_offsets import Progress
from mailboat.consumer.broker.lanes import Lanes
from support.broker_parts import FakeClaims, FakeSource, record, running
from support.wait import await_until

pytestmark = pytest.mark.asyncio
WITH_AND_WITHOUT = pytest.mark.parametrize("claims", [None, FakeClaims], ids=["no store", "store"])


@given(st.lists(st.integers(1, 3), max_size=40), st.integers(0, 999))
async def test_a_position_never_passes_an_unsettled_message(gaps: list[int], seed: int) -> None:
    chance, progress = Random(seed), Progress()
    entries = [progress.receive(sum(gaps[: n + 1]), 10, None) for n in range(len(gaps))]
    waiting = list(entries)
    while waiting:
        progress.settle(waiting.pop(chance.randrange(len(waiting))))
        expected = [entry.offset for entry in waiting]
        assert progress.position is None or all(offset >= progress.position for offset in expected)
        first = min((entries.index(entry) for entry in waiting), default=len(entries))
        assert progress.settled == first
        assert progress.ahead == len(entries) - first
        assert progress.bytes_ahead == 10 * progress.ahead


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", None])), max_size=30), st.integers(0, 999))
async def test_a_lane_has_one_head_and_keeps_its_order(keys: list[tuple[int, str | None]], seed: int) -> None:
    chance = Random(seed)
    lanes, seen, taken = Lanes(), defaultdict(list), []
    lanes.add(record(key, n, partition=partition) for n, (partition, key) in enumerate(keys))
    for now in range(1000):
        lanes.release_due(now)
        taken += lanes.take(chance.randrange(4))
        heads = [work.lane for work in taken if work.lane is not None]
        assert len(heads) == len(set(heads)), "two events of a key are taken"
        if taken:
            work = taken.pop(chance.randrange(len(taken)))
            if chance.random() < 0.5:
                lanes.park(work, now + 2, "failed")
            else:
                seen[work.lane].append(work.record.original.offset)
                lanes.finish(work)
        if sum(map(len, seen.values())) == len(keys):
            break
    assert sum(map(len, seen.values())) == len(keys)
    assert all(offsets == sorted(offsets) for lane, offsets in seen.items() if lane is not None)


@WITH_AND_WITHOUT
async def test_a_failing_key_waits_alone_and_becomes_a_dead_letter(claims: Any) -> None:
    calls: list[tuple[str | None, int, int]] = []

    async def handle(event: Event) -> None:
        calls.append((event.key, event.json()["number"], event.attempt))
        if event.json() == {"key": "bad", "number": 1}:
            raise ValueError("never")

    store = claims and claims()
    async with running(handle, claims=store, max_attempts=3) as it:
        it.source.feed([record(key, n) for n in (1, 2) for key in ("bad", "good", None)])
        await await_until(lambda: len(it.source.settled) == 6)
        state = it.engine.state()
    assert [call for call in calls if call[0] == "bad"] == [("bad", 1, 1), ("bad", 1, 2), ("bad", 1, 3), ("bad", 2, 1)]
    assert calls.index(("good", 2, 1)) < calls.index(("bad", 1, 2)), "the good key waited for the bad one"
    (letter,) = it.dead.letters
    assert (letter.refusal.reason, letter.attempts, letter.consumer) == ("HandlerFailed", 3, "shop/billing")
    assert "ValueError: never" in letter.refusal.error
    assert (state.engine.dead, state.counts.refused) == (1, 3)
    if store:
        assert sorted(state for state, _ in store.states.values()) == ["dead", *["done"] * 5]
        assert store.calls[0] == ("claim", 4), "one call claims all ready heads"


@WITH_AND_WITHOUT
async def test_results_of_a_handler(claims: Any) -> None:
    waited: list[int] = []

    async def handle(event: Event) -> None:
        match event.type:
            case "xignored":
                raise Ignore
            case "xrefused":
                raise Refuse("negative")
            case "xlater":
                waited.append(event.attempt)
                if len(waited) < 9:
                    raise RetryLater(seconds=0.001)
            case "xslow":
                await asyncio.sleep(60)

    async with running(handle, claims=claims and claims(), max_attempts=1, timeout=0.05) as it:
        wrong = record("wrong", 1)
        wrong.cannot_decode = "not JSON"
        foreign = record("foreign", 1)
        foreign.replay_for = "shop/other"
        kinds = ("xignored", "xrefused", "xlater", "xslow", "unknown")
        it.source.feed([wrong, foreign, *(record(kind, 1, event_type=kind) for kind in kinds)])
        await await_until(lambda: len(it.source.settled) == 7)
        counts = it.engine.counts
    assert {letter.record.event.key: letter.refusal.reason for letter in it.dead.letters} == {
        "wrong": "CannotDecode", "xrefused": "Refused", "xslow": "TimedOut", "unknown": "NoHandler",
    }  # fmt: skip
    assert waited == [1] * 9, "RetryLater cost an attempt"
    assert (counts.skipped, it.dispatcher.counts.ignored) == (1, 1)


async def test_duplicates_are_skipped_and_crashes_count_as_attempts() -> None:
    claims, handled = FakeClaims(), []
    done, died, replayed = record("a", 1), record("b", 1), record("c", 1, replay=True)
    claims.states = {
        str(done.event.id): ("done", 1), str(died.event.id): ("failed", 4), str(replayed.event.id): ("dead", 4),
    }  # fmt: skip

    async def handle(event: Event) -> None:
        handled.append((event.key, event.attempt))

    async with running(handle, claims=claims) as it:
        it.source.feed([done, died, replayed])
        await await_until(lambda: len(it.source.settled) == 3)
    assert handled == [("c", 1)]
    assert [(letter.refusal.reason, letter.attempts) for letter in it.dead.letters] == [("ConsumerDied", 4)]


async def test_only_events_that_are_about_to_start_are_claimed() -> None:
    claims, handled = FakeClaims(), []

    async def handle(event: Event) -> None:
        await asyncio.sleep(0)
        handled.append(event.key)

    async with running(handle, claims=claims, concurrency=3) as it:
        it.source.feed(record(f"k-{number}", number) for number in range(200))
        await await_until(lambda: len(it.source.settled) == 200)
    assert max(size for name, size in claims.calls if name == "claim") <= 3
    assert len(set(handled)) == 200


async def test_an_event_whose_consumers_died_gets_its_last_attempt_alone() -> None:
    claims, together = FakeClaims(), []
    suspects = [record(f"suspect-{n}", 1) for n in range(3)]
    claims.states = {str(each.event.id): ("died", 3) for each in suspects}

    async def handle(event: Event) -> None:
        ours = sum(state == "ours" for state, _ in claims.states.values())
        together.append((event.key or "", event.attempt, ours))
        await asyncio.sleep(0.001)

    async with running(handle, claims=claims) as it:
        it.source.feed([*(record(None, n) for n in range(20)), *suspects, *(record(None, n) for n in range(20))])
        await await_until(lambda: len(it.source.settled) == 43)
    found = [call for call in together if call[0]]
    assert sorted(found) == [(f"suspect-{n}", 4, 1) for n in range(3)], "attempts, and events claimed at that time"
    assert not it.dead.letters


@pytest.mark.parametrize("handle_unclaimed", [False, True], ids=["Wait", "Handle"])
async def test_an_outage_of_the_claim_store(handle_unclaimed: bool, caplog: pytest.LogCaptureFixture) -> None:
    claims, attempts = FakeClaims(), []
    inside, gate = asyncio.Event(), asyncio.Event()

    async def handle(event: Event) -> None:
        attempts.append(event.attempt)
        inside.set()
        await gate.wait()

    async with running(handle, claims=claims, handle_unclaimed=handle_unclaimed) as it:
        it.source.feed([record("a", 1)])
        await inside.wait()
        claims.away = True  # the result of the first event can't be stored
        gate.set()
        it.source.feed([record("a", 2), record("b", 1)])
        await await_until(lambda: it.engine.state().claims_error is not None)
        if handle_unclaimed:
            await await_until(lambda: len(it.source.settled) == 3)
            assert it.engine.counts.unclaimed == 2
        else:
            assert not it.source.settled
            claims.away = False
            await await_until(lambda: len(it.source.settled) == 3)
            assert it.engine.state().claims_error is None
    assert attempts == [1, 1, 1]
    assert caplog.text.count("Claim store unavailable") == 1


async def test_a_claim_without_a_reply_is_released_if_its_partition_was_revoked() -> None:
    class LostReply(FakeClaims):
        lost = True

        async def claim(self, claims: Sequence[Claim]) -> list[ClaimReply]:
            replies = await super().claim(claims)
            if self.lost:
                raise ClaimsUnavailable("the reply was lost")
            return replies

    claims, handled = LostReply(), []

    async def handle(event: Event) -> None:
        handled.append(event.key)

    async with running(handle, claims=claims) as it:
        it.source.feed([record("a", 1), record("b", 1, partition=1)])
        await await_until(lambda: len(claims.states) == 2)
        await it.engine.revoke([0], 60)
        claims.lost = False
        await await_until(lambda: len(it.source.settled) == 1)
        await await_until(lambda: sorted(claims.states.values()) == [("done", 2), ("failed", 0)])
    assert handled == ["b"]


async def test_nothing_is_settled_before_its_dead_letter_is_written() -> None:
    async def handle(event: Event) -> None:
        raise Refuse("no")

    async with running(handle, claims=FakeClaims()) as it:
        it.dead.away = True
        it.source.feed([record("a", 1), record("a", 2)])
        await await_until(lambda: it.engine.state().dead_letters_error is not None)
        assert not it.source.settled
        it.dead.away = False
        await await_until(lambda: len(it.source.settled) == 2)
    assert [letter.record.original.offset for letter in it.dead.letters] == [1, 2]


async def test_too_many_dead_letters_in_a_row_stop_the_consumer() -> None:
    async def handle(event: Event) -> None:
        raise Refuse("a bad deployment")

    async with running(handle, claims=FakeClaims(), stop_at=3, concurrency=2) as it:
        it.source.feed([record(None, n) for n in range(20)])
        await await_until(lambda: it.engine.state().stopped is not None and len(it.source.settled) == 3)
        assert "3 events in a row" in (it.engine.state().stopped or "")
    assert len(it.dead.letters) == 3


@WITH_AND_WITHOUT
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_revoke_drains_and_a_stop_gives_back(claims: Any, kind: str) -> None:
    inside, gate, handled = [], asyncio.Event(), []
    store = claims and claims()

    async def wait(event: Event) -> None:
        inside.append(event.key)
        await gate.wait()
        handled.append(event.key)

    def block(event: Event) -> None:
        inside.append(event.key)
        while not gate.is_set():
            time.sleep(0.01)  # a handler that can't be interrupted
        handled.append(event.key)

    async with running(wait if kind == "async" else block, claims=store, concurrency=2, max_attempts=1) as it:
        it.source.feed([record(key, 1, partition=p) for p in (0, 1) for key in ("a", "b", "a")])
        await await_until(lambda: len(inside) == 2)
        draining = asyncio.create_task(it.engine.revoke([0], 60))
        await await_until(lambda: len(it.source.released) == 1)  # the second event of a, which was not started
        assert not draining.done()
        gate.set()
        await draining
        await await_until(lambda: len(it.source.settled) == 5)
        gate.clear()
        it.source.feed([record("c", 1, partition=1)])
        await await_until(lambda: inside[-1] == "c")
    assert not it.dead.letters, "a shutdown made a dead letter"
    assert len(it.source.settled) == 5
    gate.set()
    if kind == "async":
        assert it.source.released[-1].event.key == "c"
        assert not store or sorted(store.states.values()) == [("done", 1)] * 5 + [("failed", 0)]
    else:  # the thread may still run, so the claim is not released
        assert not store or ("ours", 1) in store.states.values()


@WITH_AND_WITHOUT
async def test_a_lost_partition_is_not_settled_and_its_key_does_not_overlap(claims: Any) -> None:
    running_now, gate, most = 0, asyncio.Event(), 0

    async def handle(event: Event) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await gate.wait()
        running_now -= 1

    async with running(handle, claims=claims and claims()) as it:
        first = record("a", 1)
        it.source.feed([first])
        await await_until(lambda: running_now == 1)
        it.engine.lose([0])
        again = record("a", 1)
        again.event = first.event
        it.source.feed([again, record("a", 2)])  # the partition was assigned again
        gate.set()
        await await_until(lambda: len(it.source.settled) == 2)
    assert most == 1
    assert it.source.settled[0] is again


async def test_context_variables_do_not_leak_between_events() -> None:
    from contextvars import ContextVar

    leaked, seen = ContextVar("leaked", default=0), []

    async def handle(event: Event) -> None:
        seen.append(leaked.get())
        leaked.set(event.json()["number"])
        await asyncio.sleep(0)
        assert leaked.get() == event.json()["number"]

    async with running(handle, concurrency=1) as it:
        it.source.feed([record("a", n) for n in (1, 2, 3)])
        await await_until(lambda: len(it.source.settled) == 3)
    assert seen == [0, 0, 0]


async def test_the_log_names_a_handler_that_blocks_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def rude(event: Event) -> None:
        time.sleep(2.6)  # noqa: ASYNC251

    async with running(rude) as it:
        it.source.feed([record("a", 1)])
        await await_until(lambda: it.source.settled)
    assert "Event loop blocked" in caplog.text
    assert "rude" in caplog.text
    assert "time.sleep" in caplog.text
    assert isinstance(it.source, FakeSource)


async def test_events_are_claimed_while_earlier_ones_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims run ahead only if handlers do not wait: if the process dies, claimed events wait for the lease to end."""

    class SlowClaims(FakeClaims):
        calling = False

        async def claim(self, claims: Sequence[Claim]) -> list[ClaimReply]:
            self.calling = True
            for _ in range(5):
                await asyncio.sleep(0)
            self.calling = False
            return await super().claim(claims)

    monkeypatch.setattr(claimer, "_SOON", 60.0)  # so that a busy machine does not count as a slow handler
    store, meanwhile, most = SlowClaims(), 0, 0

    async def handle(event: Event) -> None:
        nonlocal meanwhile, most
        meanwhile += store.calling
        most = max(most, len(it.engine._in_flight.claimed))

    async with running(handle, claims=store) as it:
        it.source.feed([record(f"key-{n}", n) for n in range(3_000)])
        await await_until(lambda: len(it.source.settled) == 3_000)
    assert meanwhile > 1_500, "most events are handled while the next ones are claimed"
    assert most <= 512
