"""``mailboat run``: one process with relays, their HTTP server and the watchers, until a signal.

Without ``--follow``, the manifests are read once and may contain several OutboxRelays. With ``--follow``, there is one
OutboxRelay, and its configuration may arrive later and change. Secrets are watched in both cases.
"""

import asyncio
import logging
import os
import secrets as random_tokens
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from mailboat.cli.options import PATH, ManifestSource, outboxes_of, with_logging, with_manifests
from mailboat.errors import ConfigError, DatabaseUnavailable, MailboatError
from mailboat.http.auth import CallerAuth
from mailboat.http.server import HttpApi, HttpServer, parse_address
from mailboat.runtime.config_source import ConfigSource, Configuration
from mailboat.runtime.file_watch import fingerprint, secret_versions, watch
from mailboat.runtime.gc_settings import configure_gc
from mailboat.runtime.manifest_files import STANDARD_INPUT, load, subscription_warnings, warnings
from mailboat.runtime.relay import Relay
from mailboat.runtime.relay_status import ProcessStatus
from mailboat.runtime.secrets import Secrets, secrets_folder
from mailboat.runtime.shutdown import first_of
from mailboat.store.settings import RelayIdentity
from mailboat_spec import Manifests, full_name
from mailboat_spec.relay_status import ConfigReport
from mailboat_spec.stop_signals import stop_on_signals

log = logging.getLogger("mailboat.run")


@click.command()
@with_manifests
@click.option("--relay-id", metavar="ID", help="Name of this relay, unique per database. [default: host name + random]")
@click.option(
    "--listen", default="127.0.0.1:8080", show_default=True, help="Address of /status etc.; port 0: any free one."
)
@click.option(
    "--advertise",
    metavar="HOST",
    default="",
    help="Name or IP address by which `mailboat status` reaches this relay, if it listens on all. [default: host name]",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Apply changes of the files, and of PUT /config, without a restart. The files may be missing at first.",
)
@click.option(
    "--control-keys",
    type=PATH,
    help="File with Ed25519 public keys (PEM): calls signed with one of them are accepted. With --audience.",
)
@click.option("--audience", metavar="TEXT", help="Audience that signed calls must name: this relay.")
@with_logging
def run(
    source: ManifestSource,
    relay_id: str | None,
    listen: str,
    advertise: str,
    follow: bool,
    control_keys: Path | None,
    audience: str | None,
) -> None:
    """Deliver events until SIGTERM or SIGINT.

    At the first signal, batches in flight are finished, progress is committed and partitions are released. The second
    signal ends the process at once. If a database or a destination is unavailable, the relay retries.
    """
    if (control_keys is None) != (audience is None):
        raise click.UsageError("--control-keys and --audience go together: a signed call names the relay it is for")
    if control_keys is not None and not follow and not control_keys.is_file():  # with --follow it may appear later
        raise ConfigError(f"--control-keys: {control_keys} is no file. Write the public keys into it first.")
    if follow and STANDARD_INPUT in source.files:
        raise click.UsageError("--follow watches files: it can't watch standard input (-f -)")
    manifests = None if follow else load(source.files)
    for warning in warnings(manifests) if manifests is not None else ():
        log.warning("Probably a mistake in a manifest: %s.", warning)
    try:
        callers = CallerAuth()
        if control_keys is not None and audience is not None:
            from mailboat.http.jwt_auth import JwtVerifier  # large, needed only here

            callers = CallerAuth(JwtVerifier(control_keys, audience))
        folder = secrets_folder(source.secrets_dir, os.environ, must_exist=not follow)
        relay_id = relay_id or f"{socket.gethostname()}-{random_tokens.token_hex(3)}"
        process = Process(source.files, folder, source.secrets, relay_id, parse_address(listen), callers, advertise)
        configure_gc()
        asyncio.run(process.run(manifests))
    except Exception as error:
        if not isinstance(error, MailboatError):
            log.critical("Relay failed unexpectedly", exc_info=True)  # the CLI only prints it
        raise
    _exit()


def _exit() -> NoReturn:
    """Exit after a completed shutdown, without the exit handlers of C libraries.

    If a thread of a vendor's client still uses TLS while OpenSSL's exit handler frees its memory, a clean shutdown can
    end in a segmentation fault. A relay was seen to end in one, once; this cause is likely, not proven.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader may have closed the pipe
            stream.flush()
    os._exit(0)


@dataclass(eq=False)
class Process:
    """The options of ``mailboat run``, and the state shared by the relays of the process."""

    files: tuple[Path, ...]
    secrets_folder: Path | None
    secrets: Secrets
    relay_id: str
    listen: InitVar[tuple[str, int]]
    callers: CallerAuth
    advertised: InitVar[str] = ""

    def __post_init__(self, listen: tuple[str, int], advertised: str) -> None:
        self.stop = asyncio.Event()
        self.configured = asyncio.Event()
        self.relays: list[Relay] = []
        # Before any relay reads them: a secret replaced while relays are created would be missed until its next change.
        self._secrets_seen = fingerprint([self.secrets_folder]) if self.secrets_folder is not None else None
        self.secret_versions = secret_versions(self.secrets_folder)
        self._server = HttpServer(*listen, advertised)

    async def run(self, manifests: Manifests | None) -> None:
        """Run relays until a signal: for the manifests or, without them, for the configuration that is followed."""
        async with aclosing(self):
            outboxes = outboxes_of(manifests, self.secrets) if manifests is not None else []
            for outbox in outboxes:
                # Relays of one process may share a database, in which relay ids are unique.
                suffix = f"/{full_name(outbox.relay)}" if len(outboxes) > 1 else ""
                self._add(Configuration(outbox.relay, outbox.subscriptions), self.relay_id + suffix, follows=False)
            async with self.serving(ConfigSource(self.configure) if manifests is None else None):
                await first_of(self.configured, self.stop)
                await self._run_all()

    def configure(self, config: Configuration) -> None:
        """Apply a followed configuration. The first one adds the relay."""
        for warning in (each for resource in config.subscriptions for each in subscription_warnings(resource)):
            log.warning("Probably a mistake in a manifest: %s.", warning)
        if self.relays:
            self.relays[0].reconfigure(config)
        else:
            self._add(config, self.relay_id, follows=True)

    def _add(self, config: Configuration, relay_id: str, *, follows: bool) -> None:
        if not config.subscriptions:
            name = full_name(config.relay)
            log.warning("No EventSubscription refers to this relay: nothing is delivered.", extra={"relay": name})
        identity = RelayIdentity(relay_id, str(uuid.uuid4()), self._server.address)
        self.relays.append(Relay(config, secrets=self.secrets, identity=identity, follows=follows))
        self.configured.set()

    @asynccontextmanager
    async def serving(self, followed: ConfigSource | None) -> AsyncIterator[None]:
        """Run the HTTP server and the watchers for the duration of the block."""

        def status() -> ProcessStatus:
            relays = tuple(each.status() for each in self.relays)
            return ProcessStatus(relays, followed.report if followed else ConfigReport(), self.secret_versions)

        configure = followed.push if followed is not None else None
        api = HttpApi(status, self.assign, self.callers, self.stop.is_set, configure)
        with ExitStack() as tasks:

            def begin(work: Coroutine[Any, Any, None]) -> None:
                task = asyncio.create_task(work)
                task.add_done_callback(self._on_task_done)
                tasks.callback(task.cancel)

            if followed is not None:
                begin(followed.follow(self.files))
            stop_on_signals(self.stop, log)  # before the process is reported as running
            await self._server.start(api.routes())
            names = [each.name for each in self.relays]
            log.info("Listening.", extra={"address": self._server.address, "id": self.relay_id, "relays": names})
            if self.secrets_folder is not None:
                # Last step before relays start: a refresh before their start would have no effect.
                begin(watch([self.secrets_folder], self._secrets_changed, seen=self._secrets_seen))
            yield

    async def aclose(self) -> None:
        await self._server.close()
        log.info("Stopped.", extra={"id": self.relay_id})

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Shut down if a watcher failed unexpectedly: a restart is better than a relay that misses changes."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("Watcher task failed; shutting down.", exc_info=error)
            self.stop.set()

    async def assign(self, name: str, generation: int, owners: dict[int, str]) -> bool:
        if not self.relays:
            raise DatabaseUnavailable("there is no configuration yet that says which database: try again")
        for relay in self.relays:
            with suppress(LookupError):
                return await relay.assign(name, generation, owners)
        raise LookupError(name)

    async def _run_all(self) -> None:
        """Run until all relays have stopped. If one fails, stop the others gracefully and raise its error."""
        relays = [asyncio.create_task(relay.run(self.stop)) for relay in self.relays]
        for relay in relays:
            relay.add_done_callback(lambda _: self.stop.set())
        for error in filter(None, await asyncio.gather(*relays, return_exceptions=True)):
            raise error

    async def _secrets_changed(self) -> None:
        for relay in self.relays:
            relay.refresh()
        self.secret_versions = secret_versions(self.secrets_folder)
