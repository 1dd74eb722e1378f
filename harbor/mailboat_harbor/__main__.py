"""``python -m mailboat_harbor``: fetch and build every real part before the tests need it, and say what is missing.

Exit code 1 in CI (``CI=true``) when a part is missing; elsewhere the tests that need it are skipped, and say so.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from mailboat_harbor.golang import built_program
from mailboat_harbor.kafka_apache import java_command
from mailboat_harbor.missing import PartMissing
from mailboat_harbor.pgbouncer import find_pgbouncer
from mailboat_harbor.postgres_binaries import NEWEST, OLDEST, find_postgres

PARTS: dict[str, Callable[[], object]] = {
    f"Postgres {NEWEST}": lambda: find_postgres(NEWEST),
    f"Postgres {OLDEST}": lambda: find_postgres(OLDEST),
    "kfake": lambda: built_program("kfake"),
    "pstest": lambda: built_program("pstest"),
    "Apache Kafka": java_command,
    "PgBouncer": find_pgbouncer,
}


def main() -> int:
    missing = 0
    for name, get in PARTS.items():
        print(f"{name:14}", end="", flush=True)
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
    sys.exit(main())
