"""Without a store, attempts are counted in memory and nothing is remembered."""

from __future__ import annotations

import pytest

from mailboat.consumer.broker.protocol import Busy, Claim, Claimed, Failure
from mailboat.consumer.claims.memory_store import MemoryClaims


async def test_attempts_and_due_times_are_kept_until_the_event_is_finished(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    store = MemoryClaims(consumer="billing", clock=lambda: now)
    await store.open()
    assert "handled twice" in caplog.text
    first, second = Claim("e1"), Claim("e2")
    assert await store.claim([first, second]) == [Claimed(1), Claimed(1)]
    assert isinstance((await store.claim([first]))[0], Busy)
    assert await store.fail([Failure("e1", 5), Failure("e2", 7, counted=False)]) == [True, True]
    assert await store.claim([first, second]) == [Busy(5), Busy(7)]
    now += 7
    assert await store.claim([first, second]) == [Claimed(2), Claimed(1)]
    await store.release(["e1"])
    assert await store.claim([first]) == [Claimed(2)]
    assert await store.done(["e1"]) == [True]
    assert await store.dead(["e2"]) == [True]
    assert await store.done(["e1"]) == [False]
    assert await store.claim([first, second]) == [Claimed(1), Claimed(1)]
