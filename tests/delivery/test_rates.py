"""Event rates: the events of the last ten seconds."""

from __future__ import annotations

import asyncio

import pytest

from mailboat.delivery.counters import DeliveryRate
from support.simulation import Fleet
from support.virtual_time import in_virtual_time


def test_a_rate_covers_the_last_ten_seconds_without_the_current_one() -> None:
    rate = DeliveryRate()
    assert rate.at(100.0) == 0.0
    rate.add(100.1, 20)
    rate.add(100.9, 30)
    assert rate.at(100.9) == 0.0, "the second is not over"
    assert rate.at(101.0) == 50.0
    assert rate.at(104.9) == 12.5, "the first event is four seconds ago"
    assert rate.at(110.9) == 5.0
    assert rate.at(111.0) == 0.0, "the burst is over"
    rate.add(5000.0, 70)
    assert rate.at(5001.0) == 7.0


@pytest.mark.parametrize("per_second", [1, 40])
def test_a_steady_rate_is_exact(per_second: int) -> None:
    rate = DeliveryRate()
    for number in range(30 * per_second):
        rate.add(100 + number / per_second, 1)
    assert rate.at(130.0) == per_second


@in_virtual_time
async def test_delivered_events_count() -> None:
    fleet = Fleet()
    fleet.write("a", "b", "c", "d", "e")
    relay = fleet.start()
    await fleet.all_settled()
    assert relay.session is not None
    (stream,) = relay.session.streams.values()
    await asyncio.sleep(1)
    assert stream.meters.rate.at(stream.clock()) == 5.0
