"""Support for tests of applications: consumers without a database, and the events that a transaction has emitted.

async with bench(billing) as box:
    await box.send("order.placed", {"order": "o-1"}, key="o-1")
    assert box.handled == ["order.placed"]

place_order(connection)
assert_emitted(connection, "order.placed", key="o-1")
"""

from mailboat.testing.consumer_bench import Bench, DeadEvent, RecordingTransaction, bench
from mailboat.testing.emitted_events import EmittedEvent, assert_emitted, emitted

__all__ = ["Bench", "DeadEvent", "EmittedEvent", "RecordingTransaction", "assert_emitted", "bench", "emitted"]
