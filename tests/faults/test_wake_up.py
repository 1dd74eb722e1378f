"""Wake-up of an idle relay by the NOTIFY of writers, according to `wake.notify`.

The poll interval of most relays here is so long that no poll finds an event of the test. Every event arrives because of
a NOTIFY.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from mailboat_devservers.postgres import Database
from support.inprocess_relay import STAGED, StagedSink, events, serving, status_of, write
from support.ledger import Written, check_delivery
from support.manifests import Manifest
from support.relay_processes import outbox_relay, subscription
from support.wait import await_until

Stage = dict[str, StagedSink]
SELDOM = {"pollInterval": "10m", "maxIdleInterval": "10m"}
BY_POLL = {"pollInterval": "1s", "maxIdleInterval": "1s"}
ROUNDS = 5

pytestmark = pytest.mark.verify


def _relay(url: str, **wake: Any) -> Manifest:
    manifest = outbox_relay(url)
    return manifest | {"spec": manifest["spec"] | {"wake": wake}}


@pytest.fixture
def ears(each_outbox: Database) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Connection that receives every NOTIFY."""
    with psycopg.connect(each_outbox.url, autocommit=True) as connection:
        connection.execute("listen mailboat")
        yield connection


def _rings(ears: psycopg.Connection[tuple[Any, ...]]) -> int:
    return len(list(ears.notifies(timeout=0.2)))


async def _two_heartbeats(outbox: Database) -> None:
    """Wait for two heartbeats. A relay that finds no events is idle by then."""
    heard: set[object] = set()

    def third() -> bool:
        heard.update(outbox.execute("select beat_at from mailboat.relays"))
        return len(heard) == 3

    await await_until(third, what="two more heartbeats")


@pytest.mark.parametrize("notify", ["Auto", "Always"])
async def test_an_idle_relay_is_woken_by_a_notification(
    notify: str, each_outbox: Database, stage: Stage, ears: psycopg.Connection[tuple[Any, ...]]
) -> None:
    outbox = each_outbox
    manifests = _relay(outbox.url, notify=notify, **SELDOM), subscription("orders", STAGED, partitions=2)
    committed: dict[str, Written] = {}
    async with serving(*manifests) as relay:
        await await_until(lambda: len(status_of(relay, "orders").owned) == 2, what="the relay")
        for number in range(1, ROUNDS + 1):
            await _two_heartbeats(outbox)
            await await_until(
                lambda: outbox.execute("select active from mailboat.wakeup_requests") == [(True,)], what="sleep"
            )
            _rings(ears)  # discard earlier notifications
            committed.update(write(outbox.url, events(1, 1, first=number)))
            await await_until(lambda: len(stage["orders"].arrived) == len(committed), 30, "the event, by a ring")
            assert list(ears.notifies(timeout=30, stop_after=1)), "nobody rang"
    check_delivery(committed, (), stage["orders"].arrivals)


async def test_with_notify_never_the_poll_finds_the_event(
    each_outbox: Database, stage: Stage, ears: psycopg.Connection[tuple[Any, ...]]
) -> None:
    outbox = each_outbox
    manifests = _relay(outbox.url, notify="Never", **BY_POLL), subscription("orders", STAGED, partitions=2)
    committed: dict[str, Written] = {}
    async with serving(*manifests) as relay:
        await await_until(lambda: len(status_of(relay, "orders").owned) == 2, what="the relay")
        for number in range(1, ROUNDS + 1):
            await _two_heartbeats(outbox)
            committed.update(write(outbox.url, events(1, 1, first=number)))
            await await_until(lambda: len(stage["orders"].arrived) == len(committed), 30, "the event, by a poll")
        assert _rings(ears) == 0
    check_delivery(committed, (), stage["orders"].arrivals)
