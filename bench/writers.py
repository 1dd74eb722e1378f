"""What the relay's doorbell costs those who write: commits per second of sixteen connections, by ``wake.notify``.

NOTIFY makes Postgres commit one transaction after the other. Every commit here is one event, by pgbench, so that the
writers are as fast as writers can be.
"""

from __future__ import annotations

import os
import re
import subprocess

from measurement import Measured
from setup import Relay, Stage

CONNECTIONS = 16
_SCRIPT = """\
insert into mailboat.outbox (event_type, aggregate_type, aggregate_id, key, payload)
values ('order.placed', 'order', 'order-' || :client_id, 'order-' || :client_id, convert_to(repeat('x', 200), 'UTF8'));
"""


def commits_per_second(stage: Stage, name: str, notify: str | None, seconds: int) -> Measured:
    """With one relay at work; ``None``: without any."""
    url, topic = stage.new_database(name), stage.new_topic(name)
    if notify is None:
        return _pgbench(stage, url, seconds)
    with Relay(stage, url, topic, notify=notify) as relay:
        relay.until_ready()
        return _pgbench(stage, url, seconds)


def _pgbench(stage: Stage, url: str, seconds: int) -> Measured:
    script = stage.folder / "write.sql"
    script.write_text(_SCRIPT)
    binaries = stage.postgres.binaries
    done = subprocess.run(
        [binaries.tool("pgbench"), "--no-vacuum", "--protocol=prepared", f"--client={CONNECTIONS}", "--jobs=1",
         f"--time={seconds}", f"--file={script}", url],
        env={**os.environ, **binaries.env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"number of transactions actually processed: (\d+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"pgbench failed: {done.stderr.strip()}")
    return Measured(int(found[1]), float(seconds), 0.0)
