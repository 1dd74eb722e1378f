"""Concurrent measurement of large windows: one that takes minutes does not delay another."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from mailboat.store.outbox_store import CursorGroup
from mailboat.store.settings import ReadLimits
from mailboat.store.window_reads import WindowReads
from mailboat_devservers.postgres import Database
from support.store_backends import SETTINGS, PostgresWorld, subscription
from support.store_relays import Relay, write
from support.wait import await_until


async def test_one_that_takes_long_keeps_no_other_from_being_measured(
    outbox_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = WindowReads.measure
    begun, may_end = threading.Event(), threading.Event()

    def slowly(self: WindowReads, pipeline: Any, group: CursorGroup) -> Any:
        if group == large:
            begun.set()
            assert may_end.wait(60)
        return measured(self, pipeline, group)

    monkeypatch.setattr(WindowReads, "measure", slowly)
    world = PostgresWorld(outbox_database)
    settings = replace(SETTINGS, limits=ReadLimits(small_rows=2))
    relay = await Relay.start(world, [subscription("one"), subscription("other")], settings=settings)
    write(world, *"abcdefgh")
    large, small = (
        CursorGroup(relay.cursors[key].settled_snapshot, (relay.lease(key),)) for key in sorted(await relay.claim())[:2]
    )
    waiting = asyncio.create_task(relay.store.measure(large))
    try:
        await await_until(begun.is_set, what="the long one to begin")
        async with asyncio.timeout(60):
            window = await relay.store.measure(small)
        assert window is not None
        assert not waiting.done()
    finally:
        may_end.set()
    assert await waiting is not None
    await world.close()
