"""A real Postgres server that a test may stop, crash, clone and promote.

No setting reduces durability (fsync stays on): crash tests depend on it. Connections use TCP on the loopback interface.
User ``postgres`` is a superuser and needs no password. Members of the role ``needs_password`` need a password, for
tests of wrong credentials.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from mailboat_devservers.errors import ServerFailed
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres_binaries import PostgresBinaries, find_postgres
from mailboat_devservers.processes import Account, Child, kill_tree, launch_command, signal_tree, unprivileged
from mailboat_devservers.readiness import takes_connections

__all__ = ["Database", "PostgresBinaries", "PostgresServer", "find_postgres"]

_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "fsync": "on",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_HBA = """\
# For pg_upgrade, which connects by a socket in its own folder.
local all        all             trust
# A superuser is a member only by an explicit grant.
host all         +needs_password 127.0.0.1/32 scram-sha-256
host all         all             127.0.0.1/32 trust
host replication all             127.0.0.1/32 trust
"""
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer(Child):
    """One server with its own folder: ``data`` is the data directory, ``server.log`` the log."""

    def __init__(self, binaries: PostgresBinaries, directory: Path, port: int, account: Account) -> None:
        self.binaries = binaries
        self.directory = directory
        self.port = port
        self._account = account
        super().__init__(
            f"Postgres {binaries.major} on port {port}",
            [binaries.tool("postgres"), "-D", str(directory / "data"), "-p", str(port)],
            log=directory / "server.log",
            ready=self._answers,
            env=binaries.env,
            account=account,
            death_signal=signal.SIGQUIT,  # immediate shutdown: like a crash, but releases shared memory
        )

    @classmethod
    def start(
        cls,
        binaries: PostgresBinaries,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> Self:
        """Create a new cluster in the folder and start it. ``settings`` are added to postgresql.conf."""
        server = cls(binaries, directory, port or free_port(), unprivileged())
        server._prepare_directory()
        server._initialise()
        server._configure({**_SETTINGS, **(settings or {})})
        server.launch()
        server.execute("create role needs_password nologin")
        return server

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def url(self, dbname: str = "postgres", user: str = "postgres", password: str | None = None) -> str:
        """Return a libpq URL."""
        secret = "" if password is None else f":{quote(password, safe='')}"
        return f"postgresql://{quote(user, safe='')}{secret}@127.0.0.1:{self.port}/{quote(dbname, safe='')}"

    def execute(self, statement: LiteralString | sql.Composed, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        """Execute and commit one statement as superuser; return its rows, if any."""
        with psycopg.connect(self.url(dbname), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def create_database(self, name: str, template: str | None = None) -> None:
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" template {}").format(sql.Identifier(template))
        self._insist(statement)

    def drop_database(self, name: str) -> None:
        """Drop a database even if sessions are connected to it."""
        self._insist(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _insist(self, statement: sql.Composed) -> None:
        """Retry for 60 seconds: the server waits only five seconds for ending sessions, too short on a busy machine."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.execute(statement)
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: ``smart`` waits for clients, ``fast`` disconnects them, ``immediate`` requires recovery."""
        self._end(_STOP_SIGNALS[mode])

    def kill(self) -> None:
        """Send SIGKILL to the postmaster and all backends, like a power failure: no checkpoint, no flush."""
        # Each backend leads its own process group, so a signal to the child's group would reach only the postmaster.
        if self._process is not None:
            kill_tree(self._process)

    def suspend(self) -> None:
        """Send SIGSTOP to the postmaster and all backends."""
        signal_tree(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT to the postmaster and all backends."""
        signal_tree(self.pid, signal.SIGCONT)

    def clone_standby(self, directory: Path) -> PostgresServer:
        """Start a streaming hot standby from a copy of this server. Raise ``PartMissing`` without pg_basebackup."""
        standby = PostgresServer(self.binaries, directory, free_port(), self._account)
        self.binaries.tool("pg_basebackup")
        standby._prepare_directory()
        options = ["-X", "stream", "--checkpoint=fast", "--write-recovery-conf", "--no-sync"]
        standby._run("pg_basebackup", "-d", self.url(), "-D", str(standby.data), *options)
        standby.launch()
        return standby

    def upgrade(self, binaries: PostgresBinaries, directory: Path) -> PostgresServer:
        """Start a server of a newer major on a copy of the data made by pg_upgrade. This server must be stopped."""
        newer = PostgresServer(binaries, directory, free_port(), self._account)
        newer._prepare_directory()
        newer._initialise()
        before, after = ["-b", str(self.binaries.bin), "-d", str(self.data)], ["-D", str(newer.data)]
        newer._run("pg_upgrade", *before, *after, "-U", "postgres", "--no-sync")
        newer._configure(_SETTINGS)
        newer.launch()
        return newer

    def promote(self) -> None:
        """Promote this standby; return once it accepts writes."""
        if self.execute("select pg_promote(wait => true)") != [(True,)]:
            raise ServerFailed(f"{self.name} did not become a primary.\n{self.log_tail()}")

    def _answers(self) -> bool:
        return takes_connections(self.url())

    def _prepare_directory(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._account.own(self.directory)

    def _initialise(self) -> None:
        """Run initdb with checksums, the default of newer majors: pg_upgrade requires the same on both sides."""
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--data-checksums", "--no-sync"]
        self._run("initdb", "-D", str(self.data), *options)

    def _configure(self, settings: Mapping[str, str]) -> None:
        lines = [f"{name} = {_quoted(value)}" for name, value in settings.items()]
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("\n".join(["", *lines, ""]))
        (self.data / "pg_hba.conf").write_text(_HBA)

    def _run(self, tool: str, *arguments: str) -> None:
        """Run one of Postgres' programs as the server's user in its folder."""
        command = launch_command([self.binaries.tool(tool), *arguments], self._account, signal.SIGKILL)
        done = subprocess.run(
            command,
            cwd=self.directory,
            env={**self._env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServerFailed(f"{tool} failed for {self.name}:\n{done.stdout}")


@dataclass(frozen=True, slots=True)
class Database:
    """One database of a server, as most tests need it."""

    server: PostgresServer
    name: str

    @property
    def url(self) -> str:
        return self.server.url(self.name)

    def url_for(self, user: str, password: str | None = None) -> str:
        return self.server.url(self.name, user, password)

    def execute(self, statement: LiteralString | sql.Composed) -> list[tuple[Any, ...]]:
        """Execute and commit one statement as superuser; return its rows, if any."""
        return self.server.execute(statement, self.name)


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
