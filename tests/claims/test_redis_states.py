"""Every state transition of a key, on Valkey and on Redis 7. Redis' clock decides: tests write times into values."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mailboat.consumer.broker.interfaces import Busy, Claim, Claimed, ClaimReply, FailedAttempt, Finished
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat_devservers.redis_server import RedisServer

PAST, FUTURE = 1_000, 9_999_999_999_999
TTL = 720 * 3600


@pytest.fixture
def redis(each_redis: RedisServer) -> Any:
    return each_redis.client()


@pytest.fixture
def key(consumer: str) -> str:
    return f"test:{consumer}:e1"


def without_time(value: str | None) -> str | None:
    """Return the value with ``T`` for a time in the future, and ``-`` for one in the past."""
    if value is None or value.count("|") < 3:
        return value
    state, owner, at, rest = value.split("|", 3)
    return f"{state}|{owner}|{'T' if int(at) > time.time() * 1000 else '-'}|{rest}"


@pytest.mark.parametrize(
    ("before", "reply", "after"),
    [
        (None, Claimed(1), "p|me:b|T|1"),
        ("p|me:b|FUTURE|2", Claimed(2), "p|me:b|T|2"),  # the reply to the first claim was lost
        ("p|me:b|PAST|2|1", Claimed(2, 1), "p|me:b|T|2|1"),
        ("p|other:z|PAST|2", Claimed(3, 1), "p|me:b|T|3|1"),  # the owner died or hangs
        ("p|other:z|PAST|3|2", Claimed(4, 3), "p|me:b|T|4|3"),
        ("p|me:a|FUTURE|1", Claimed(2, 1), "p|me:b|T|2|1"),  # the own container was restarted
        ("f||PAST|3|1", Claimed(4, 1), "p|me:b|T|4|1"),
        ("d", Finished(), "d"),
        ("x", Finished(dead=True), "x"),
        ("1", Finished(), "1"),  # written by an older SETNX helper
        ("processed", Finished(), "processed"),
        ("p|broken", Finished(), "p|broken"),
    ],
)
async def test_a_claim(
    store: RedisClaims, redis: Any, key: str, before: str | None, reply: ClaimReply, after: str
) -> None:
    if before is not None:
        redis.set(key, before.replace("FUTURE", str(FUTURE)).replace("PAST", str(PAST)))
    assert await store.claim([Claim("e1")]) == [reply]
    assert without_time(redis.get(key)) == after
    if isinstance(reply, Claimed):
        assert TTL - 60 < redis.ttl(key) <= TTL


@pytest.mark.parametrize("before", ["p|other:z|UNTIL|1", "p|me:c|UNTIL|1", "f||UNTIL|2"])
async def test_a_held_or_parked_event_is_waited_for(store: RedisClaims, redis: Any, key: str, before: str) -> None:
    seconds, microseconds = redis.time()
    redis.set(key, before.replace("UNTIL", str(seconds * 1000 + microseconds // 1000 + 60_000)))
    (reply,) = await store.claim([Claim("e1")])
    assert isinstance(reply, Busy)
    assert 30 < reply.seconds <= 60


async def test_a_key_of_another_type_counts_as_done(store: RedisClaims, redis: Any, key: str) -> None:
    redis.hset(key, "state", "done")
    assert await store.claim([Claim("e1")]) == [Finished()]
    assert await store.done(["e1"]) == [False]
    assert await store.fail([FailedAttempt("e1", 0)]) == [False]


@pytest.mark.parametrize(
    ("before", "reply", "after"),
    [("x", Claimed(1), "p|me:b|T|1"), ("d", Finished(), "d"), (None, Claimed(1), "p|me:b|T|1")],
)
async def test_a_replay_reopens_a_dead_letter_only(
    store: RedisClaims, redis: Any, key: str, before: str | None, reply: ClaimReply, after: str
) -> None:
    if before is not None:
        redis.set(key, before)
    redis.set(f"{key}-other", "x")
    replies = await store.claim([Claim("e1", replay=True), Claim("e1-other")])
    assert replies == [reply, Finished(dead=True)]
    assert without_time(redis.get(key)) == after


MINE = f"p|me:b|{FUTURE}|3|1"
THEIRS = f"p|other:z|{FUTURE}|4|1"


@pytest.mark.parametrize(
    ("action", "before", "ours", "after"),
    [
        ("done", MINE, True, "d"),
        ("done", f"p|me:b|{PAST}|1", True, "d"),  # the lease expired, without a takeover
        ("done", None, True, "d"),  # Redis lost the claim
        ("done", THEIRS, False, "p|other:z|T|4|1"),
        ("done", "d", False, "d"),
        ("done", f"f||{FUTURE}|4|1", False, "d"),  # taken over and failed there, handled here
        ("dead", MINE, True, "x"),
        ("dead", THEIRS, False, "p|other:z|T|4|1"),
        ("dead", f"f||{FUTURE}|4|1", False, "f||T|4|1"),
        ("fail", MINE, True, "f||T|3|1"),
        ("fail", f"p|me:b|{FUTURE}|1", True, "f||T|1"),
        ("fail", THEIRS, False, "p|other:z|T|4|1"),
        ("fail", "d", False, "d"),
        ("fail uncounted", MINE, True, "f||T|2|1"),
        ("fail uncounted", f"p|me:b|{FUTURE}|1", True, "f||T|0"),
        ("release", MINE, None, "f||-|2|1"),
        ("release", f"p|me:b|{FUTURE}|1", None, None),
        ("release", THEIRS, None, "p|other:z|T|4|1"),
    ],
)
async def test_a_result(
    store: RedisClaims, redis: Any, key: str, action: str, before: str | None, ours: bool | None, after: str | None
) -> None:
    if before is not None:
        redis.set(key, before)
    if action == "release":
        await store.release(["e1"])
    elif action == "done":
        assert await store.done(["e1"]) == [ours]
    elif action == "dead":
        assert await store.dead(["e1"]) == [ours]
    else:
        forever = float("inf")  # for an event without attempts left and without a dead-letter topic
        assert await store.fail([FailedAttempt("e1", forever, counted=action == "fail")]) == [ours]
    assert without_time(redis.get(key)) == after


async def test_an_event_that_this_store_holds_is_not_given_out_twice(store: RedisClaims) -> None:
    assert await store.claim([Claim("e1")]) == [Claimed(1)]
    assert isinstance((await store.claim([Claim("e1")]))[0], Busy)
    await store.release(["e1"])
    assert await store.claim([Claim("e1")]) == [Claimed(1)]


async def test_many_events_in_one_call_keep_their_order(store: RedisClaims, redis: Any, key: str) -> None:
    redis.set(f"{key}700", "d")
    redis.set(f"{key}1100", "x")
    ids = [f"e1{number}" for number in range(1200)]
    replies = await store.claim([Claim(event_id, replay=event_id == "e11100") for event_id in ids])
    assert [number for number, reply in enumerate(replies) if reply != Claimed(1)] == [700]
    assert await store.fail([FailedAttempt(event_id, int(event_id[2:])) for event_id in ids[:600]]) == [True] * 600
    assert set(await store.done(ids[600:])) == {True, False}
    seconds, _ = redis.time()
    due = int((redis.get(f"{key}500") or "").split("|")[2]) / 1000
    assert abs(due - seconds - 500) < 60
