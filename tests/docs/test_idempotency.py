"""docs/idempotency.md: the first example runs, the others compile, the ACL rights and the forecast are correct."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mailboat.consumer.claims.redis_health import forecast
from mailboat_devservers.redis_server import RedisServer
from support.markdown import blocks, rows

PAGE = (Path(__file__).parents[2] / "docs/idempotency.md").read_text(encoding="utf-8")


def test_the_example_of_once_handles_an_event_once(valkey: RedisServer, unique_name: Callable[[str], str]) -> None:
    example, *others = blocks(PAGE, "python")
    for other in others:
        ast.parse(other)
    charged: list[dict[str, Any]] = []

    async def charge(order: dict[str, Any]) -> None:
        charged.append(order)

    consumer = unique_name("billing")
    names: dict[str, Any] = {"charge": charge}
    exec(example.replace("redis://localhost", valkey.url).replace('"billing"', f'"{consumer}"'), names)

    async def twice() -> None:
        for _ in range(2):
            await names["handle"]("e1", {"order": "o-1"})
        await names["once"]._redis.aclose()

    asyncio.run(twice())
    assert charged == [{"order": "o-1"}]


def test_the_rights_are_those_that_the_test_of_a_user_has() -> None:
    (line,) = [each for each in PAGE.splitlines() if each.startswith("ACL SETUSER")]
    tested = (Path(__file__).parents[1] / "claims/test_redis_faults.py").read_text(encoding="utf-8")
    for right in line.split()[5:]:
        assert right.startswith("~") or right in tested.split("RIGHTS = ")[1].splitlines()[0]


def test_the_memory_table_is_the_forecast() -> None:
    assert [row[3] for row in rows(PAGE, "### Memory")] == ["0.52 GB", "52 GB", "520 GB"]
    assert "720 h in about 200 bytes: 518 MB for 1 event/s, 51.8 GB for 100 events/s" in forecast(2592000, 0)
    assert "suffices for 1.93 events/s" in forecast(2592000, 10**9)
