"""``python -m mailboat_devservers``: fetch and build the real parts before the tests need them, and report missing
ones.

Without an argument, the parts of most tests. With ``api``, those of a Kubernetes API server: a separate group, because
they take minutes to build and only some tests need them.

If a part is missing in CI (``CI=true``), the exit code is 1. Elsewhere the tests that need it are skipped with a
message.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from mailboat_devservers.errors import PartMissing
from mailboat_devservers.golang import built_program
from mailboat_devservers.kafka_apache import java_command
from mailboat_devservers.kubernetes_programs import API_PROGRAMS, kubernetes_program
from mailboat_devservers.pgbouncer import find_pgbouncer
from mailboat_devservers.postgres_binaries import NEWEST, OLDEST, find_postgres
from mailboat_devservers.redis_server import find_redis, find_valkey

Parts = Mapping[str, Callable[[], object]]

_MOST: Parts = {
    f"Postgres {NEWEST}": lambda: find_postgres(NEWEST),
    f"Postgres {OLDEST}": lambda: find_postgres(OLDEST),
    "kfake": lambda: built_program("kfake"),
    "pstest": lambda: built_program("pstest"),
    "Apache Kafka": java_command,
    "PgBouncer": find_pgbouncer,
    "Valkey": find_valkey,
    "Redis": find_redis,
}
_API: Parts = {name: partial(kubernetes_program, name) for name in API_PROGRAMS}
_GROUPS = {"": _MOST, "api": _API}


def main(group: str) -> int:
    if group not in _GROUPS:
        known = ", ".join(name for name in _GROUPS if name)
        print(f"there are no parts called {group!r}; there are: {known}, and without a name those of most tests")
        return 2
    missing = 0
    for name, get in _GROUPS[group].items():
        print(f"{name:24}", end="", flush=True)
        began = time.monotonic()
        try:
            get()
        except PartMissing as reason:
            missing += 1
            print(f"missing: {reason}")
            continue
        took = time.monotonic() - began
        print("ready" if took < 1 else f"ready (made in {took:.0f} s)")
    return 1 if missing and os.environ.get("CI") == "true" else 0


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))
