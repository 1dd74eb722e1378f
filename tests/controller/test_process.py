"""The tasks of a leader run and end together."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from mailboat_operator.process import Operator
from mailboat_operator.relays.signing_keys import turned
from mailboat_operator.settings import read_settings

SETTINGS = read_settings({"operator_namespace": "mailboat-system", "relay_image": "mailboat-relay:1"})


class Keys:
    """Signing keys whose first rotation succeeds and whose later ones fail, once the controller runs."""

    def __init__(self, running: asyncio.Event):
        self.rotations = 0
        self._running = running

    async def rotate(self):
        self.rotations += 1
        if self.rotations > 1:
            await self._running.wait()
            raise RuntimeError("nobody thought of this")
        return turned(None, datetime.now(UTC))


async def test_a_leader_ends_if_the_rotation_of_its_signing_keys_fails(monkeypatch):
    started, ended = asyncio.Event(), asyncio.Event()

    async def core(*_):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    keys: Any = Keys(started)
    nothing: Any = None
    monkeypatch.setattr("mailboat_operator.process.run_controller", core)
    operator = Operator(SETTINGS, CollectorRegistry())
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="nobody thought of this")):
        async with asyncio.timeout(10):
            await operator._work(nothing, keys)
    assert ended.is_set(), "the controller still runs when the lease is released"
