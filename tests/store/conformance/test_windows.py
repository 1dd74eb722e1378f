"""Windows: their events, their settlement, and lost cursors, which neither settle nor hide events of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mailboat.errors import DatabaseUnavailable
from mailboat.store.outbox_store import Measured, Settlement
from mailboat.store.settings import ReadLimits
from support.store_backends import SETTINGS, PostgresWorld, World, subscription
from support.store_relays import Relay, write

ONE = [subscription(partitions=1)]
LARGE = replace(SETTINGS, limits=ReadLimits(small_rows=3, rows=2, bytes=1_000_000))


async def test_an_event_comes_once_its_transaction_commits_and_not_before(world: World) -> None:
    relay = await Relay.start(world, ONE)
    await relay.claim()
    slow = world.begin(early=True)
    late = slow.insert("order.placed", key="a")
    (quick,) = write(world, "b")
    assert [event.event_id for event in await relay.drained()] == [quick]
    slow.commit()
    assert [event.event_id for event in await relay.drained()] == [late]


async def test_a_transaction_that_takes_its_number_first_and_commits_last_is_not_skipped(world: World) -> None:
    relay = await Relay.start(world, ONE)
    await relay.claim()
    early = world.begin(early=True)
    written = []
    for _ in range(3):
        written += write(world, "b")
        await relay.drained()
    last = early.insert("order.placed", key="b")
    early.commit()
    assert [event.event_id for event in await relay.drained()] == [last]


async def test_rolled_back_events_are_never_delivered(world: World) -> None:
    relay = await Relay.start(world, ONE)
    await relay.claim()
    writer = world.begin()
    writer.insert("order.placed")
    writer.rollback()
    kept = write(world, None)
    assert [event.event_id for event in await relay.drained()] == kept


async def test_an_event_carries_the_written_values(world: World) -> None:
    relay = await Relay.start(world, ONE)
    await relay.claim()
    writer = world.begin()
    columns = {"aggregate_type": "order", "aggregate_id": "42"}
    event_id = writer.insert("order.placed", key="42", payload=b"\x00\xff", **columns)
    tombstone = writer.insert("order.forgotten", key="42", payload=None)
    writer.commit()
    first, second = await relay.drained()
    assert (first.event_id, first.type, first.key, first.payload) == (event_id, "order.placed", "42", b"\x00\xff")
    assert (first.aggregate_type, first.aggregate_id) == ("order", "42")
    assert (second.event_id, second.payload) == (tombstone, None)
    assert first.slot == second.slot
    assert first.created_at.endswith("Z")


async def test_a_window_is_opened_once_and_read_again_the_same(world: World) -> None:
    relay = await Relay.start(world, ONE)
    await relay.claim()
    write(world, "a", "b", "a")
    (opened,) = (await relay.tick()).opened
    assert (await relay.tick()).quiet, "an open window is not looked for again"
    write(world, "c")
    await relay.crash()
    again = await Relay.start(world, ONE)
    (key,) = await again.claim()
    cursor = again.cursors[key]
    assert cursor.window == opened.window
    chunk = await again.store.read(opened.window, [cursor.lease], 0)
    assert chunk.last
    assert chunk.events == (await relay.events(opened))


@pytest.mark.parametrize("size", [4, 5, 9])
async def test_a_large_window_is_walked_in_stretches_and_resumed_in_the_middle(world: World, size: int) -> None:
    relay = await Relay.start(world, ONE, settings=LARGE)
    (key,) = await relay.claim()
    written = write(world, *["a"] * size)
    (opened,) = (await relay.tick()).opened
    assert opened.events is None
    events = (await relay.events(opened))[key]
    assert [event.event_id for event in events] == written
    await relay.tick(Settlement(relay.lease(key), opened.window.window_snapshot, events[1].id, 2))
    await relay.crash()
    again = await Relay.start(world, ONE, settings=LARGE)
    await again.claim()
    cursor = again.cursors[key]
    assert (cursor.window, cursor.position, cursor.sequence) == (opened.window, events[1].id, 2)
    resumed = replace(opened, members=(cursor.lease,))
    assert (await again.events(resumed, cursor.position))[key] == events[2:]


async def test_a_large_window_is_measured_before_it_is_opened_and_until_then_nothing_is_written(world: World) -> None:
    relay = await Relay.start(world, ONE, settings=LARGE)
    (key,) = await relay.claim()
    written = write(world, *["a"] * 9)
    (overflowing,) = (await relay.store.tick([], relay.groups())).overflowing
    window = await relay.store.measure(overflowing)
    assert window is not None
    await relay.crash()
    again = await Relay.start(world, ONE, settings=LARGE)
    await again.claim()
    assert again.cursors[key].window is None
    stale = await again.store.tick([], [], [Measured(window, overflowing.members)])
    assert not stale.opened, "it was measured for an owner of before"
    assert stale.lost == {key}
    assert [event.event_id for event in await again.drained()] == written


async def test_a_large_window_is_measured_although_the_probing_cursor_was_lost(world: World) -> None:
    """Without bounds the window would be read as a small one: completely, in one read, by every later owner."""
    relay = await Relay.start(
        world, [subscription("one", partitions=1), subscription("two", partitions=1)], settings=LARGE
    )
    first, second = await relay.claim()
    write(world, *["a"] * 9)
    (overflowing,) = (await relay.store.tick([], relay.groups())).overflowing
    assert {lease.key for lease in overflowing.members} == {first, second}
    await relay.store.release([relay.lease(overflowing.members[0].key)])
    window = await relay.store.measure(overflowing)
    assert window is not None
    assert window.highest is not None
    result = await relay.store.tick([], [], [Measured(window, overflowing.members)])
    assert [lease.key for opened in result.opened for lease in opened.members] == [overflowing.members[1].key]
    assert result.lost == {overflowing.members[0].key}
    await relay.store.release([relay.lease(overflowing.members[1].key)])
    assert await relay.store.measure(overflowing) is None


@pytest.mark.parametrize(
    "large",
    [{"payload": b"x" * 10_000}, {"headers": {"h": "x" * 10_000}}, {"tags": [f"{n:0100}" for n in range(100)]}],
    ids=lambda columns: next(iter(columns)),
)
async def test_whole_rows_fit_into_a_read_and_not_payloads_alone(world: World, large: dict[str, Any]) -> None:
    limits = ReadLimits(small_rows=10, rows=10, bytes=25_000)
    relay = await Relay.start(world, ONE, settings=replace(SETTINGS, limits=limits))
    (key,) = await relay.claim()
    written = write(world, *["a"] * 5, **large)
    (opened,) = (await relay.tick()).opened
    assert opened.events is None, "more than one read holds"
    read, after = list[list[str]](), 0
    while not (chunk := await relay.store.read(opened.window, opened.members, after)).last:
        read.append([event.event_id for event in chunk.events.get(key, ())])
        after = chunk.reached
    read.append([event.event_id for event in chunk.events.get(key, ())])
    assert [event_id for events in read for event_id in events] == written
    assert max(map(len, read)) == 2


async def test_a_window_is_read_in_chunks_after_a_crash(world: World) -> None:
    relay = await Relay.start(world, ONE)
    (key,) = await relay.claim()
    await relay.crash()
    relay = await Relay.start(world, ONE)
    await relay.claim()
    assert (relay.cursors[key].window, relay.cursors[key].crash_count) == (None, 1), "it may have died reading"
    (group,) = relay.groups()
    assert (await relay.store.tick([], [replace(group, cautious=True)])).quiet
    written = write(world, *["a"] * 9)
    assert (await relay.store.tick([], [replace(group, cautious=True)])).overflowing == (replace(group, cautious=True),)
    (opened,) = (await relay.tick()).opened
    assert opened.events is not None
    assert opened.window.highest is None
    await relay.crash()
    again = await Relay.start(world, ONE)
    await again.claim()
    assert again.cursors[key].crash_count == 1, "counted from the window on"
    found, after = list[str](), 0
    while not (chunk := await again.store.read(opened.window, [again.lease(key)], after, crash_count=6)).last:
        (event,) = chunk.events[key]
        found.append(event.event_id)
        after = chunk.reached
    assert [*found, *(event.event_id for event in chunk.events[key])] == written


@pytest.mark.parametrize("payloads", [[None] * 5, [None, None, b"x" * 50, None, b"x" * 50, None], [b"x" * 90] * 4])
async def test_a_window_of_many_bytes_loses_no_tombstone(world: World, payloads: list[bytes | None]) -> None:
    limits = replace(SETTINGS, limits=ReadLimits(small_rows=2, rows=4, bytes=60))
    relay = await Relay.start(world, ONE, settings=limits)
    await relay.claim()
    writer = world.begin()
    written = [writer.insert("order.placed", payload=payload) for payload in payloads]
    writer.commit()
    found = await relay.drained()
    assert [event.event_id for event in found] == written
    assert [event.payload for event in found] == payloads


async def test_events_without_a_key_spread_over_all_partitions(world: World) -> None:
    relay = await Relay.start(world, [subscription(partitions=4)])
    await relay.claim()
    write(world, *[None] * 12)
    assert [len(events) for events in (await relay.drain()).values()] == [3, 3, 3, 3]


async def test_a_keys_events_stay_in_one_partition_whatever_the_subscription(world: World) -> None:
    relay = await Relay.start(world, [subscription("a", partitions=4), subscription("b", partitions=3)])
    await relay.claim()
    write(world, *[f"k{n % 7}" for n in range(40)])
    homes: dict[tuple[int, str | None], set[int]] = {}
    for key, events in (await relay.drain()).items():
        for event in events:
            homes.setdefault((key.subscription, event.key), set()).add(key.partition)
    assert len(homes) == 14
    assert all(len(partitions) == 1 for partitions in homes.values())


# -- changes of progress (G5) ----------------------------------------------------------------------------------------


async def test_a_relay_that_lost_its_cursor_settles_nothing(world: World) -> None:
    first = await Relay.start(world, ONE, "first")
    (key,) = await first.claim()
    write(world, "a", "b")
    (opened,) = (await first.tick()).opened
    stale = first.lease(key)
    await first.crash()
    second = await Relay.start(world, ONE, "first")
    await second.claim()
    third = await Relay.start(world, ONE, "third")
    result = await third.store.tick([Settlement(stale, opened.window.window_snapshot, 99, 2, closes=True)], [])
    assert result.lost == {key}
    assert second.cursors[key].window == opened.window
    await second.crash()
    fourth = await Relay.start(world, ONE, "first")
    await fourth.claim()
    assert (fourth.cursors[key].window, fourth.cursors[key].sequence) == (opened.window, 0)


async def test_a_settlement_of_another_window_is_refused(world: World) -> None:
    relay = await Relay.start(world, ONE)
    (key,) = await relay.claim()
    write(world, "a")
    (opened,) = (await relay.tick()).opened
    assert (await relay.tick(Settlement(relay.lease(key), "3:3:", 99, 7))).lost == {key}
    settled = Settlement(relay.lease(key), opened.window.window_snapshot, 1, 1, closes=True)
    assert not (await relay.tick(settled)).lost
    assert (await relay.store.tick([settled], [])).lost == {key}, "a window that is closed can't be settled again"


async def test_settling_never_moves_a_position_back(world: World) -> None:
    relay = await Relay.start(world, ONE)
    (key,) = await relay.claim()
    write(world, "a", "b", "c")
    (opened,) = (await relay.tick()).opened
    events = (await relay.events(opened))[key]
    await relay.tick(Settlement(relay.lease(key), opened.window.window_snapshot, events[1].id, 2))
    await relay.tick(Settlement(relay.lease(key), opened.window.window_snapshot, events[0].id, 2))
    await relay.crash()
    again = await Relay.start(world, ONE)
    await again.claim()
    assert again.cursors[key].position == events[1].id


# -- lost members of a group or a window -----------------------------------------------------------------------------


@pytest.mark.parametrize("lost_first", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
async def test_a_lost_member_of_a_group_hides_nothing_from_the_others(
    world: World, lost_first: bool, groups: int
) -> None:
    declared = [subscription(partitions=3)]
    relay = await Relay.start(world, declared)
    keys = await relay.claim()
    if groups == 2:  # the last partition is further than the others, as if they had settled late
        write(world, *[None] * 3)
        (opened,) = (await relay.tick()).opened
        late = [Settlement(relay.lease(key), opened.window.window_snapshot, 0, 1, closes=True) for key in keys]
        await relay.tick(late.pop())
        write(world, *[None] * 3)
        (further,) = (await relay.tick()).opened
        late.append(Settlement(relay.lease(keys[2]), further.window.window_snapshot, 0, 2, closes=True))
        await relay.store.tick(late, [])
        relay.settled_snapshot = {s.lease.key: s.window_snapshot for s in late if s.window_snapshot is not None}
    assert len(relay.groups()) == groups
    gone = keys[0] if lost_first else keys[1]
    await relay.store.release([relay.lease(gone)])
    write(world, *[None] * 6)
    result = await relay.store.tick([], relay.groups())
    assert result.lost == {gone}
    found = {lease.key: len(o.events[lease.key]) for o in result.opened for lease in o.members if o.events is not None}
    heir = await Relay.start(world, declared, "heir")
    await heir.claim([gone])
    found |= {key: len(events) for key, events in (await heir.drain()).items()}
    assert found == dict(zip(keys, [2, 2, 2] if groups == 1 else [3, 3, 2], strict=True))


@pytest.mark.parametrize("settings", [SETTINGS, LARGE], ids=["small", "large"])
async def test_a_lost_member_of_a_window_does_not_end_it_for_the_others(world: World, settings: object) -> None:
    assert isinstance(settings, type(SETTINGS))
    relay = await Relay.start(world, [subscription(partitions=2)], settings=settings)
    gone, kept = await relay.claim()
    written = write(world, *[None] * 8)
    (opened,) = (await relay.tick()).opened
    await relay.store.release([relay.lease(gone)])
    found = await relay.events(replace(opened, events=None))
    assert len(found[kept]) == len(written) / 2


async def test_a_window_of_which_all_was_lost_reads_as_the_end(world: World) -> None:
    relay = await Relay.start(world, ONE)
    (key,) = await relay.claim()
    write(world, "a")
    (opened,) = (await relay.tick()).opened
    await relay.store.release([relay.lease(key)])
    chunk = await relay.store.read(opened.window, [relay.lease(key)], 0)
    assert (dict(chunk.events), chunk.last) == ({}, True)
    settled = Settlement(relay.lease(key), opened.window.window_snapshot, 1, 1, closes=True)
    assert (await relay.store.tick([settled], [])).lost == {key}


# -- idle (G8) -------------------------------------------------------------------------------------------------------


async def test_an_idle_tick_writes_nothing(postgres_world: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mailboat.store.windows.STORE_EVERY", 0.0)
    relay = await Relay.start(postgres_world, [subscription("a"), subscription("b", partitions=3)])
    await relay.claim()
    write(postgres_world, "a", "b", "c")
    await relay.drained()
    await relay.tick()  # stores the progress of cursors without events
    before = postgres_world.row_versions()
    for _ in range(5):
        assert (await relay.tick()).quiet
        await relay.store.undecided_writers()
        for number in relay.subscriptions:
            await relay.store.backlog(number)
    assert postgres_world.row_versions() == before


async def test_progress_without_events_is_stored_later_or_before_a_release(
    postgres_world: PostgresWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mailboat.store.windows.STORE_EVERY", 3600.0)
    relay = await Relay.start(postgres_world, [subscription("a", partitions=8)])
    await relay.claim()
    before = set(postgres_world.row_versions())
    write(postgres_world, *["k"] * 3)
    await relay.drained()
    await relay.tick()

    assert len(set(postgres_world.row_versions()) - before) == 1, "only the cursor that had events"
    (current,) = set(relay.settled_snapshot.values())
    await relay.store.release([relay.lease(key) for key in relay.keys])
    stored = postgres_world.database.execute("select distinct settled_snapshot::text from mailboat.cursors")
    assert stored == [(current,)]


async def test_a_pooler_that_was_not_announced_is_detected(postgres_world: PostgresWorld) -> None:
    relay = await Relay.start(postgres_world, ONE)
    await relay.claim()
    await relay.tick()
    work = relay.store._links["work"]  # type: ignore[attr-defined]
    work.server = replace(work.server, process=work.server.process + 1)

    with pytest.raises(DatabaseUnavailable, match="pooler: Transaction"):
        await relay.tick()


async def test_events_of_partitions_of_other_relays_are_not_read(postgres_world: PostgresWorld) -> None:
    narrow = replace(SETTINGS, limits=ReadLimits(bytes=1000))
    relay = await Relay.start(postgres_world, [subscription(partitions=2)], settings=narrow)
    await relay.claim()
    write(postgres_world, *"abcdefgh")
    homes = {event.key: key for key, events in (await relay.drain()).items() for event in events}
    mine, other = relay.keys
    own, foreign = (next(key for key, home in homes.items() if home == wanted) for wanted in (mine, other))
    await relay.store.release([relay.lease(other)])
    del relay.settled_snapshot[other]

    write(postgres_world, foreign, payload=b"x" * 5000)
    (expected,) = write(postgres_world, own)
    result = await relay.tick()

    assert not result.overflowing, "the bytes of an event that is not sent count for nothing"
    [opened] = result.opened
    assert [(key, [event.event_id for event in events]) for key, events in (await relay.events(opened)).items()] == [
        (mine, [expected])
    ]
