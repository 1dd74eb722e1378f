"""Four kinds of idempotency under SIGKILL: what is lost, and what happens twice.

The consumer is ``support.claims_main``: a loop over events with a stored offset in place of a broker.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from mailboat_harbor.postgres import Database
from mailboat_harbor.redis_server import RedisServer

KILLS = 30


@pytest.mark.verify
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "loses", "doubles"),
    [("none", False, True), ("bare", True, False), ("redis", False, True), ("inbox", False, False)],
)
def test_killed_at_random_around_the_handler(
    mode: str,
    loses: bool,
    doubles: bool,
    outbox: Database,
    valkey: RedisServer,
    unique_name: Callable[[str], str],
    record_property: Callable[[str, Any], None],
) -> None:
    events = [str(uuid4()) for _ in range(2_000)]
    orders = {
        "mode": mode,
        "consumer": unique_name("contrast"),
        "redis": valkey.url,
        "postgres": outbox.url,
        "events": events,
        "handler_takes": 0.01,
    }
    command = [sys.executable, "-m", "support.claims_main", json.dumps(orders)]
    moments = random.Random(4711)
    kills = 0
    for life in range(KILLS + 1):
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd="tests", text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if life < KILLS:
                time.sleep(moments.uniform(0, 0.4))
                process.kill()
            assert process.wait(timeout=600) == (-9 if life < KILLS else 0), "the events did not last for all kills"
            kills += life < KILLS
    ((effects, distinct),) = outbox.execute("select count(*), count(distinct event_id) from effects_of_main")
    lost, twice = len(events) - distinct, effects - distinct
    for name, figure in (("kills", kills), ("lost", lost), ("twice", twice)):
        record_property(name, figure)
    assert (lost > 0) == loses, (lost, twice)
    assert doubles or twice == 0, (lost, twice)
    assert mode != "redis" or twice <= kills, (lost, twice)  # at most the event in hand at each kill
