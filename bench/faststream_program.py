"""An empty FastStream handler: BOOTSTRAP TOPIC EVENTS. Prints a ``Measured`` as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from uuid import uuid4

from faststream.confluent import KafkaBroker  # installed by faststream_peer
from measurement import Stopwatch


async def main(bootstrap: str, topic: str, events: int) -> None:
    broker = KafkaBroker(bootstrap, logger=None)
    warm, enough = asyncio.Event(), asyncio.Event()
    handled = 0

    async def handle(body: bytes) -> None:
        nonlocal handled
        handled += 1
        if handled >= events // 10:
            warm.set()
        if handled >= events:
            enough.set()

    broker.subscriber(topic, group_id=f"bench-{uuid4()}", auto_offset_reset="earliest")(handle)
    await broker.start()
    await warm.wait()
    watch, before = Stopwatch(), handled
    await enough.wait()
    print(json.dumps(asdict(watch.stop(handled - before))), flush=True)
    await broker.stop()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
