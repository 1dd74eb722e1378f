"""Parked events: heads and the events behind them, retry times, dead letters, and changes by owners only."""

from __future__ import annotations

from typing import Any

import pytest

from mailboat.model import OutboxEvent
from mailboat.store.outbox_store import CursorKey, Dead, LastFailure, Park, Settlement
from support.store_backends import World, eventually, subscription
from support.store_relays import Relay, write

ONE = [subscription(partitions=1)]
FAILURE = LastFailure("TooLarge", "too large by half")
LONG = 3600.0
MUCH = 1_000_000


async def parked(
    world: World, *parks: tuple[str | None, float | None], **columns: Any
) -> tuple[Relay, CursorKey, list[OutboxEvent]]:
    """Return a relay with parked events.

    Each event has a key and the seconds until its next attempt. None means that it waits behind the head of its key.
    """
    relay = await Relay.start(world, ONE)
    (key,) = await relay.claim()
    write(world, *[of for of, _ in parks], **columns)
    events = await relay.drained()
    await relay.tick(
        Settlement(
            relay.lease(key),
            None,
            park=tuple(
                Park(
                    event,
                    n + 1,
                    attempts=int(wait is not None),
                    retry_in=wait,
                    failure=FAILURE if wait is not None else None,
                )
                for n, (event, (_, wait)) in enumerate(zip(events, parks, strict=True))
            ),
        )
    )
    return relay, key, events


async def due(relay: Relay, key: CursorKey) -> list[int]:
    heads, _ = await relay.store.due(relay.lease(key), 100, 100 * MUCH)
    return [head.sequence for head in heads]


async def waiting(relay: Relay, key: CursorKey, of: str) -> list[tuple[int, int]]:
    return [(p.sequence, p.ordinal) for p in await relay.store.queue(relay.lease(key), of, 100, MUCH)]


async def test_a_parked_event_is_kept_whole_with_its_failure(world: World) -> None:
    relay, key, (event,) = await parked(world, ("a", 0.0))
    (head,), _ = await relay.store.due(relay.lease(key), 10, MUCH)
    assert head.event == event
    assert (head.sequence, head.attempts, head.failure) == (1, 1, FAILURE)
    assert head.first_failed_at is not None
    assert (head.replay, head.suspect, head.blocked, head.pending_dead_letter) == (False, False, False, False)


async def test_heads_become_due_and_events_behind_them_do_not(world: World) -> None:
    relay, key, _ = await parked(world, ("a", 0.0), ("a", None), ("b", LONG), ("b", None), (None, 0.0))
    assert sorted(await due(relay, key)) == [1, 5]
    assert await relay.store.parked_keys(relay.lease(key)) == ({"a", "b"}, 5)
    assert [sequence for sequence, _ in await waiting(relay, key, "a")] == [1, 2]
    assert (await relay.store.beat()).due == {key}


@pytest.mark.parametrize(
    "large", [{"payload": b"." * 10_000}, {"headers": {"h": "." * 10_000}}], ids=lambda columns: next(iter(columns))
)
@pytest.mark.parametrize(("max_bytes", "read"), [(1, 1), (19_000, 1), (21_000, 2), (39_000, 3), (MUCH, 4)])
async def test_large_ones_are_read_a_few_at_a_time_but_at_least_one(
    world: World, large: dict[str, Any], max_bytes: int, read: int
) -> None:
    keyless = [(None, 0.0)] * 4
    relay, key, _ = await parked(world, ("a", LONG), *[("a", None)] * 3, *keyless, **large)
    heads, _ = await relay.store.due(relay.lease(key), 10, max_bytes)
    assert [head.sequence for head in heads] == [5, 6, 7, 8][:read]
    queue = await relay.store.queue(relay.lease(key), "a", 10, max_bytes)
    assert [parked.sequence for parked in queue] == [1, 2, 3, 4][:read]
    assert len(await relay.store.queue(relay.lease(key), "a", 2, MUCH)) == 2


async def test_events_without_a_payload_are_counted_as_well(world: World) -> None:
    relay, key, _ = await parked(world, ("a", LONG), ("a", None), (None, 0.0), (None, 0.0), payload=None)
    assert len(await relay.store.queue(relay.lease(key), "a", 10, MUCH)) == 2
    assert len((await relay.store.due(relay.lease(key), 10, MUCH))[0]) == 2


async def test_the_time_of_the_next_attempt_is_reported(world: World) -> None:
    relay, key, _ = await parked(world, ("a", LONG), ("b", 2 * LONG))
    heads, seconds = await relay.store.due(relay.lease(key), 10, MUCH)
    assert not heads
    assert seconds == pytest.approx(LONG, abs=60)
    assert (await relay.store.beat()).due == frozenset()


async def test_without_parked_events_no_retry_is_due(world: World) -> None:
    relay = await Relay.start(world, ONE)
    (key,) = await relay.claim()
    assert await relay.store.due(relay.lease(key), 10, MUCH) == ([], None)
    assert await relay.store.parked_keys(relay.lease(key)) == (set(), 0)


async def test_when_a_head_is_gone_the_next_of_its_key_is_due_at_once(world: World) -> None:
    relay, key, _ = await parked(world, ("a", LONG), ("a", None), ("a", None), ("b", LONG))
    (_, head), (_, second), _ = await waiting(relay, key, "a")
    await relay.tick(Settlement(relay.lease(key), None, unpark=(head,)))
    assert await due(relay, key) == [2]
    await relay.tick(Settlement(relay.lease(key), None, unpark=(second,)))
    assert await due(relay, key) == [3]


async def test_another_failure_counts_up_never_down_and_waits_again(world: World) -> None:
    relay, key, (event,) = await parked(world, ("a", 0.0))
    ((_, ordinal),) = await waiting(relay, key, "a")
    again = LastFailure("Refused", "still not")
    await relay.tick(Settlement(relay.lease(key), None, park=(Park(event, 1, 3, LONG, again, ordinal=ordinal),)))
    assert await due(relay, key) == []
    await relay.tick(Settlement(relay.lease(key), None, park=(Park(event, 1, 2, 0.0, ordinal=ordinal),)))
    (head,), _ = await relay.store.due(relay.lease(key), 10, MUCH)
    assert (head.attempts, head.failure) == (3, again)


async def test_a_blocked_head_and_the_events_behind_it_are_never_due(world: World) -> None:
    relay, key, events = await parked(world, ("a", 0.0), ("a", None))
    (_, head), _ = await waiting(relay, key, "a")
    blocked = Park(events[0], 1, 25, None, FAILURE, blocked=True, ordinal=head)
    await relay.tick(Settlement(relay.lease(key), None, park=(blocked,)))
    assert await due(relay, key) == []
    queue = await relay.store.queue(relay.lease(key), "a", 10, MUCH)
    assert [parked.blocked for parked in queue] == [True, False]
    assert (await relay.store.backlog(key.subscription)).blocked == 1
    assert await relay.store.parked_keys(relay.lease(key)) == ({"a"}, 2)


async def test_a_pending_dead_letter_or_a_suspect_is_marked(world: World) -> None:
    relay, key, (event,) = await parked(world, ("a", 0.0))
    ((_, head),) = await waiting(relay, key, "a")
    doomed = Park(event, 1, 25, 0.0, FAILURE, pending_dead_letter=True, ordinal=head)
    await relay.tick(Settlement(relay.lease(key), None, park=(doomed,)))
    (pending_dead_letter,), _ = await relay.store.due(relay.lease(key), 10, MUCH)
    assert pending_dead_letter.pending_dead_letter
    write(world, "b")
    (event,) = await relay.drained()
    suspect = Park(event, 2, 1, 0.0, FAILURE, suspect=True)
    await relay.tick(Settlement(relay.lease(key), None, park=(suspect,)))
    heads, _ = await relay.store.due(relay.lease(key), 10, MUCH)
    assert {head.sequence: head.suspect for head in heads} == {1: False, 2: True}


async def test_a_dead_letter_ends_the_retries_and_its_key_continues(world: World) -> None:
    relay, key, events = await parked(world, ("a", LONG), ("a", None))
    (_, head), _ = await waiting(relay, key, "a")
    await relay.tick(Settlement(relay.lease(key), None, dead=(Dead(events[0], 1, 25, FAILURE, head),)))
    assert await due(relay, key) == [2]
    backlog = await relay.store.backlog(key.subscription)
    assert (backlog.dead, dict(backlog.parked)) == (1, {key.partition: 1})


async def test_many_large_dead_letters_and_the_rest_of_their_keys_are_one_settlement(world: World) -> None:
    """The server sends results while the store is still sending statements."""
    parks = [(f"key-{n // 2}", LONG if n % 2 == 0 else None) for n in range(20)]
    relay, key, events = await parked(world, *parks, payload=b"." * 2_000_000)
    queues = [await waiting(relay, key, f"key-{n}") for n in range(10)]
    dead = tuple(Dead(events[2 * n], 2 * n + 1, 25, FAILURE, queue[0][1]) for n, queue in enumerate(queues))
    again = tuple(Park(event, 100 + n, 1, LONG, FAILURE) for n, event in enumerate(events))
    await relay.tick(Settlement(relay.lease(key), None, dead=dead, park=again))
    assert sorted(await due(relay, key)) == [2 * n + 2 for n in range(10)]
    assert (await relay.store.parked_keys(relay.lease(key)))[1] == 30


async def test_a_replayed_dead_letter_precedes_waiting_events_and_is_marked(world: World) -> None:
    relay, key, events = await parked(world, ("a", 0.0), ("a", None))
    (_, head), _ = await waiting(relay, key, "a")
    await relay.tick(Settlement(relay.lease(key), None, dead=(Dead(events[0], 1, 25, FAILURE, head),)))
    await world.replay_all()
    queue = await relay.store.queue(relay.lease(key), "a", 10, MUCH)
    assert [(parked.sequence, parked.replay, parked.attempts) for parked in queue] == [(1, True, 0), (2, False, 0)]
    assert queue[0].event == events[0]
    assert await due(relay, key) == [1]
    assert (await relay.store.backlog(key.subscription)).dead == 0


async def test_the_order_of_a_queue_is_not_that_of_sequence_numbers(world: World) -> None:
    """A new number of partitions restarts sequences, and events parked before keep their old ones."""
    relay, key, events = await parked(world, ("a", LONG), ("a", None), ("a", None), ("a", None))
    numbers = (900, 901, 5, 6)
    queue = [ordinal for _, ordinal in await waiting(relay, key, "a")]
    dead = [
        Dead(event, number, 25, FAILURE, ordinal) for event, number, ordinal in zip(events, numbers, queue, strict=True)
    ]
    await relay.tick(Settlement(relay.lease(key), None, dead=(dead[2], dead[0], dead[1])))
    await world.replay_all()
    assert [parked.event for parked in await relay.store.queue(relay.lease(key), "a", 10, MUCH)] == events
    assert await due(relay, key) == [900]


async def test_parking_and_progress_are_one_step(world: World) -> None:
    relay = await Relay.start(world, ONE)
    (key,) = await relay.claim()
    write(world, "a", "b")
    (opened,) = (await relay.tick()).opened
    first, second = (await relay.events(opened))[key]
    stale = Settlement(relay.lease(key), "3:3:", second.id, 2, park=(Park(first, 1, 1, 0.0, FAILURE),))
    assert (await relay.store.tick([stale], [])).lost == {key}
    assert await relay.store.parked_keys(relay.lease(key)) == (set(), 0)
    right = Settlement(
        relay.lease(key), opened.window.window_snapshot, second.id, 2, True, (Park(first, 1, 1, 0.0, FAILURE),)
    )
    assert not (await relay.store.tick([right], [])).lost
    assert await relay.store.parked_keys(relay.lease(key)) == ({"a"}, 1)


async def test_a_relay_that_lost_its_cursor_changes_no_parked_event(world: World) -> None:
    relay, key, events = await parked(world, ("a", 0.0))
    ((_, ordinal),) = await waiting(relay, key, "a")
    await relay.store.release([relay.lease(key)])
    stale = Settlement(
        relay.lease(key),
        None,
        unpark=(ordinal,),
        park=(Park(events[0], 1, 9, None, FAILURE, ordinal=ordinal),),
        dead=(Dead(events[0], 1, 9, FAILURE, ordinal),),
    )
    assert (await relay.store.tick([stale], [])).lost == {key}
    heir = await Relay.start(world, ONE, "heir")
    await heir.claim()
    (head,), _ = await heir.store.due(heir.lease(key), 10, MUCH)
    assert (head.ordinal, head.attempts) == (ordinal, 1)


async def test_a_change_to_no_ordering_releases_events_behind_others(world: World) -> None:
    relay, key, _ = await parked(world, ("a", LONG), ("a", None), ("b", 0.0), ("b", None))
    await relay.tick(Settlement(relay.lease(key), None, ordered=False, arrange=frozenset("ab")))
    assert sorted(await due(relay, key)) == [2, 3, 4], "the head of a goes on waiting for its time"


async def test_a_change_back_to_ordering_leaves_one_head_per_key(world: World) -> None:
    relay, key, _ = await parked(world, ("a", LONG), ("a", None), ("b", 0.0), ("b", None))
    await relay.tick(Settlement(relay.lease(key), None, ordered=False, arrange=frozenset("ab")))
    await relay.tick(Settlement(relay.lease(key), None, arrange=frozenset("ab")))
    assert await due(relay, key) == [3]


async def test_a_waiting_head_becomes_due(world: World) -> None:
    relay, key, _ = await parked(world, ("a", 0.2))

    async def is_due() -> bool:
        return await due(relay, key) == [1]

    await eventually(is_due, what="the head's time")
