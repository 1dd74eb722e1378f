"""Relay processes that a test can kill, suspend, stop and restart, and their manifests.

A fleet serves one outbox. Its relays end with the test run. They are ``mailboat run`` or, for other timings or a kill
at a checkpoint, `relay_main` forked by `relay_forkserver`. The report of a failed test has the ends of their logs and
the rows of relays, cursors and parked events.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import psycopg

from mailboat.delivery.stream import Checkpoint
from mailboat.runtime.timings import Timings
from mailboat.store.settings import ReadLimits
from mailboat_devservers.processes import Child
from support.manifests import Manifest, event_subscription, outbox_relay_on
from support.relay_forkserver import ForkedProcess, is_open
from support.wait import wait_until

TESTS = Path(__file__).parents[1]

SWIFT = Timings(beat_every=0.25, lease_ttl=20.0, overdue_after=0.75, grace=3.0, probe_every=1.0, deadline=15.0)
"""Timings with takeovers in a second, so that many fit into a minute."""

WALKING = ReadLimits(small_rows=30, rows=200)
"""Small limits, so that many windows are large and read in chunks."""


# ---- manifests ----------------------------------------------------------------------------------------------------


outbox_relay = functools.partial(outbox_relay_on, name="outbox", namespace="faults", wake={"maxIdleInterval": "2s"})


def subscription(name: str, sink: Mapping[str, Any], **spec: Any) -> Manifest:
    """Return an EventSubscription of that relay, with a delivery time-out shorter than the outages of the tests."""
    return event_subscription(
        name, sink, **{"relay": "outbox", "namespace": "faults", "delivery": {"timeout": "5s"}, **spec}
    )


# ---- processes ----------------------------------------------------------------------------------------------------


class RelayProcess(Child):
    """One relay. ``launch`` does not wait for readiness, since a relay may be killed before it is ready."""

    def __init__(self, relay: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.relay = relay
        self._earlier = _mentions(log)
        super().__init__(f"relay {relay}", [sys.executable, *command], log=log, ready=_at_once, env=env)

    @property
    def status(self) -> int | None:
        """Exit status, or minus the signal; None while the process runs."""
        return None if self._process is None else self._process.poll()

    @property
    def connections(self) -> int:
        """Number of connections of this process. Earlier processes of the same name wrote to the same log."""
        return _mentions(self.log) - self._earlier

    def until_connected(self, times: int = 1, timeout: float = 60.0) -> None:
        wait_until(
            lambda: self.connections >= times or not self.running,
            timeout,
            f"{self.name} to connect; its log is\n{self.log_tail()}",
        )
        assert self.running, f"{self.name} ended with status {self.status}.\n{self.log_tail()}"


class ForkedRelay(RelayProcess):
    """Relay of a fork server."""

    def __init__(self, relay: str, server: ForkServer, orders: Mapping[str, Any], log: Path) -> None:
        super().__init__(relay, (), log, {})
        self._server = server
        self._orders = orders

    def launch(self) -> None:
        self._process = cast("subprocess.Popen[bytes]", ForkedProcess(self._server.id, self._orders, self.log))


class ForkServer(Child):
    """Process that forks relays."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.id = secrets.token_hex(8)
        path = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))])
        command = [sys.executable, "-m", "support.relay_forkserver", self.id]
        ready = functools.partial(is_open, self.id)
        super().__init__("fork server", command, log=None, ready=ready, env={**env, "PYTHONPATH": path})


_fork_servers: dict[frozenset[tuple[str, str]], ForkServer] = {}


def fork_server(env: Mapping[str, str]) -> ForkServer:
    """Return the fork server of all fleets with this environment. The server ends with the test run."""
    kind = frozenset(env.items())
    if kind not in _fork_servers:
        _fork_servers[kind] = ForkServer(env)
        _fork_servers[kind].launch()
    return _fork_servers[kind]


def _at_once() -> bool:
    return True


def _mentions(log: Path) -> int:
    return log.read_text(errors="replace").count("Connected.") if log.exists() else 0


@dataclass(frozen=True, slots=True)
class DieAt:
    """Checkpoint at which a relay kills itself."""

    point: Checkpoint
    passage: int = 1
    in_the_air: int = 0
    """Least number of unanswered batches."""
    answers: int = 0
    """Least number of answered batches."""


class Fleet:
    """The relays of one outbox, which are killed at the end of the ``with`` block.

    Without ``timings`` the relays are ``mailboat run`` with default timings.
    """

    def __init__(
        self,
        directory: Path,
        manifests: Sequence[Manifest],
        *,
        timings: Timings | None = SWIFT,
        limits: ReadLimits | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.relays: dict[str, RelayProcess] = {}
        self.kills = 0
        """Number of kills, those by ``die_at`` included."""
        self.manifests = manifests
        self._directory = directory
        self._timings = timings
        self._limits = limits
        self._env = dict(env or {})
        self._numbers = itertools.count(1)
        self._url: str = manifests[0]["spec"]["database"]["url"]
        directory.mkdir(parents=True, exist_ok=True)
        for number, manifest in enumerate(manifests):
            (directory / f"{number:02}.json").write_text(json.dumps(manifest))

    def start(self, relay: str | None = None, *, die_at: DieAt | None = None) -> RelayProcess:
        """Start a relay with a new or a previous id. Do not wait for its connection."""
        relay = relay or f"relay-{next(self._numbers)}"
        place = self._directory / "orders"
        place.mkdir(exist_ok=True)
        log = place / f"{relay}.log"
        process = (
            ForkedRelay(relay, fork_server(self._env), self._tuned(relay, die_at), log)
            if self._timings or self._limits or die_at
            else RelayProcess(relay, self._as_a_user_would(relay), log, self._env)
        )
        process.launch()
        self.relays[relay] = process
        if die_at is not None:
            self.kills += 1
        return process

    def _tuned(self, relay: str, die_at: DieAt | None) -> dict[str, Any]:
        return {
            "manifests": str(self._directory),
            "relay": relay,
            "timings": asdict(self._timings) if self._timings else None,
            "limits": asdict(self._limits) if self._limits else None,
            "die_at": {**asdict(die_at), "point": die_at.point.value} if die_at else None,
        }

    def _as_a_user_would(self, relay: str) -> list[str]:
        command = [
            "-c",
            "from mailboat.cli.main import main; main()",
            "run",
            "-f",
            str(self._directory),
            "--relay-id",
            relay,
        ]
        return [*command, "--listen", "127.0.0.1:0", "--log-format", "text", "--log-level", "debug"]

    def start_connected(self, count: int) -> list[RelayProcess]:
        """Start several relays and wait until all are connected."""
        started = [self.start() for _ in range(count)]
        for process in started:
            process.until_connected()
        return started

    def kill(self, relay: RelayProcess) -> None:
        """Send SIGKILL."""
        relay.kill()
        self.kills += 1
        self.relays.pop(relay.relay, None)

    def stop(self, relay: RelayProcess) -> None:
        """Send SIGTERM and require exit status 0."""
        relay.stop()
        assert relay.status == 0, f"{relay.name} ended with status {relay.status}.\n{relay.log_tail()}"
        self.relays.pop(relay.relay, None)

    @property
    def working(self) -> list[RelayProcess]:
        """Connected relays. To kill any other relay would only test the start of a process."""
        return [relay for relay in self.relays.values() if relay.running and relay.connections]

    def logs(self, lines: int = 40) -> str:
        """Return the ends of the logs, also of ended relays, the newest last."""
        files = sorted((self._directory / "orders").glob("*.log"), key=lambda file: file.stat().st_mtime)
        return "\n".join(
            f"--- {file.stem}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
            for file in files[-6:]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for relay in self.relays.values():
            relay.kill()
        if error is not None:
            error.add_note(f"Logs of the relays:\n{self.logs()}")
            error.add_note(f"State in the database:\n{bookkeeping(self._url)}")


# ---- ownership in the database ------------------------------------------------------------------------------------


def owners(url: str) -> dict[tuple[str, int], str | None]:
    """Return the owners by subscription and partition."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select s.name, c.partition, c.owner from mailboat.cursors c"
            " join mailboat.subscriptions s on s.id = c.subscription_id"
        ).fetchall()
    return {(name.split("/", 1)[-1], partition): owner for name, partition, owner in rows}


def bookkeeping(url: str) -> str:
    """Return relays, cursors and parked events as text for reports."""
    lines: list[str] = []
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            for table, columns in (
                ("relays", "id, session_lock, clock_timestamp() - beat_at as silent, expires_at > now() as alive"),
                (
                    "cursors",
                    "subscription_id, partition, owner, released, crash_count, settled_snapshot, window_snapshot,"
                    " lowest, highest, position",
                ),
                ("parked", "subscription_id, partition, key, sequence, attempts, next_attempt_at, reason"),
            ):
                rows = connection.execute(f"select {columns} from mailboat.{table} order by 1, 2").fetchall()
                lines += [f"--- {table} ({columns})", *(" | ".join(map(str, row)) for row in rows[:40])]
    except psycopg.Error as error:
        lines.append(f"(not available: {error})")
    return "\n".join(lines)


def shares(url: str) -> dict[str | None, int]:
    """Return the number of partitions per owner."""
    counts: dict[str | None, int] = {}
    for owner in owners(url).values():
        counts[owner] = counts.get(owner, 0) + 1
    return counts
