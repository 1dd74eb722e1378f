"""Options shared by commands, and the connection from manifests to a database."""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import iscoroutine
from pathlib import Path
from typing import Any

import click

from mailboat.errors import ConfigError, DatabaseUnavailable, InRecovery
from mailboat.runtime.manifest_files import load
from mailboat.runtime.secrets import DIRECTORY_VARIABLE, Secrets, database_url, find_secrets, secrets_folder
from mailboat.store.admin.overview import KnownSubscription, known_subscriptions
from mailboat.store.connection import PostgresConnection
from mailboat.store.table import TableLayout, renamed
from mailboat_spec import Duration, EventSubscription, Manifests, OutboxRelay, full_name
from mailboat_spec.structured_logs import LogFormat, configure

Command = Callable[..., Any]

_LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"])
_HINT = "\nCheck that the server runs and can be reached from here, and the host, port, user and password of the URL."

PATH = click.Path(path_type=Path, readable=False)
"""Path that click does not check. Opening it reports errors with one wording and exit code; click's differ."""

MANIFESTS_VARIABLE = "MAILBOAT_MANIFESTS"
"""Default of -f. The operator sets it in relay containers; several paths are separated by colons."""
DEFAULT_MANIFEST = Path("mailboat.yaml")


def _manifests(context: click.Context, _: click.Parameter, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the files of -f or of the variable, else ``mailboat.yaml`` of the current folder."""
    if files or context.resilient_parsing or context.params.get("urls"):
        return files
    if DEFAULT_MANIFEST.exists():
        return (DEFAULT_MANIFEST,)
    raise click.UsageError(
        f"no manifest: give -f FILE (or -f FOLDER, or -f - for standard input), set ${MANIFESTS_VARIABLE}, or write"
        f" {DEFAULT_MANIFEST} in this folder. `mailboat init` writes one to begin with."
    )


manifest_option = click.option(
    "-f",
    "--file",
    "files",
    type=PATH,
    multiple=True,
    envvar=MANIFESTS_VARIABLE,
    callback=_manifests,
    help="Manifest, folder of manifests (*.yaml, *.yml, *.json), or - for standard input. May be given again."
    f" [default: ${MANIFESTS_VARIABLE}; then ./{DEFAULT_MANIFEST}]",
)
secrets_option = click.option(
    "--secrets-dir",
    type=click.Path(path_type=Path, file_okay=False, readable=False),
    help=f"Folder with secrets as <secret>/<key>. [default: ${DIRECTORY_VARIABLE}; then $MAILBOAT_SECRET_<NAME>_<KEY>]",
)


def with_manifests(command: Command) -> Command:
    """Add -f and --secrets-dir to a command, which receives them as ``source``. It may be a coroutine function."""

    @manifest_option
    @secrets_option
    @wraps(command)
    def wrapper(files: tuple[Path, ...], secrets_dir: Path | None, **options: Any) -> None:
        result = command(source=ManifestSource(files, secrets_dir), **options)
        if iscoroutine(result):
            asyncio.run(result)

    return wrapper


def for_each_outbox(command: Command) -> Command:
    """Add -f and --secrets-dir to a command, which runs once for each OutboxRelay of the manifests."""

    @with_manifests
    @wraps(command)
    async def wrapper(source: ManifestSource, **options: Any) -> None:
        for outbox in source.outboxes():
            await command(outbox=outbox, **options)

    return wrapper


def with_logging(command: Command) -> Command:
    """Add --log-level and --log-format to a command, and configure logging before it runs."""

    @click.option(
        "--log-level", type=_LOG_LEVELS, default="info", show_default=True, help="Lowest level that is logged."
    )
    @click.option(
        "--log-format",
        type=click.Choice([each.value for each in LogFormat]),
        default=LogFormat.AUTO.value,
        show_default=True,
        help="auto: readable on a terminal, JSON lines elsewhere. Goes to standard error.",
    )
    @wraps(command)
    def wrapper(log_level: str, log_format: str, **options: Any) -> None:
        configure("mailboat", log_level, LogFormat(log_format))
        command(**options)

    return wrapper


@dataclass(frozen=True, slots=True)
class Outbox:
    """One OutboxRelay of the manifests, with its subscriptions and the access to its database."""

    relay: OutboxRelay
    subscriptions: tuple[EventSubscription, ...]
    secrets: Secrets

    @property
    def table(self) -> str:
        return self.relay.spec.outbox.table

    @property
    def layout(self) -> TableLayout:
        return TableLayout(self.table, renamed(self.relay.spec.outbox.columns))

    @property
    def unordered(self) -> frozenset[str]:
        return frozenset(full_name(s) for s in self.subscriptions if s.spec.ordering == "None")

    @asynccontextmanager
    async def link(self, purpose: str) -> AsyncIterator[PostgresConnection]:
        """Open a database connection for one command. Errors name the relay and the source of its URL."""
        url, database = database_url(self.relay, self.secrets), self.relay.spec.database
        try:
            link = await PostgresConnection.open(lambda: url, purpose, pooler=database.pooler)
        except (ConfigError, DatabaseUnavailable) as error:
            reference = database.url_secret_ref
            where = "spec.database.url" if reference is None else f"Secret {reference.name}, key {reference.key}"
            hint = _HINT if isinstance(error, DatabaseUnavailable) and not isinstance(error, InRecovery) else ""
            raise type(error)(f"OutboxRelay {full_name(self.relay)} ({where}): {error}{hint}") from error
        async with link:
            yield link


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """Manifest files, and the folder of the Secrets that they refer to."""

    files: tuple[Path, ...]
    secrets_dir: Path | None = None

    @property
    def secrets(self) -> Secrets:
        return find_secrets(self.secrets_dir, os.environ)

    def outboxes(self, *, needs_relay: bool = True) -> list[Outbox]:
        manifests = load(self.files, needs_relay=needs_relay)
        folder = secrets_folder(self.secrets_dir, os.environ, must_exist=True)
        return outboxes_of(manifests, Secrets(folder, os.environ))


def manifests_of(files: Sequence[Path]) -> Manifests:
    """Load manifests, which may be of consumers behind a broker only. Raise ``ConfigError`` if there is none."""
    manifests = load(files, needs_relay=False)
    return manifests if manifests.subscriptions else load(files)


def outboxes_of(manifests: Manifests, secrets: Secrets) -> list[Outbox]:
    served: dict[str, list[EventSubscription]] = defaultdict(list)
    for each in manifests.subscriptions:
        served[f"{each.metadata.namespace}/{each.spec.relay}"].append(each)
    return [Outbox(relay, tuple(served[full_name(relay)]), secrets) for relay in manifests.relays]


async def find_subscription(choices: Sequence[Outbox], name: str) -> tuple[Outbox, KnownSubscription]:
    """Return the only subscription of that name from any outbox. Raise ``ConfigError`` for an ambiguous name, too."""
    found = await find_subscriptions(choices, name)
    if len(found) > 1:
        raise ConfigError(f"{name} is the name of several: {', '.join(each.name for _, each in found)}. Say which one.")
    return found[0]


async def find_subscriptions(choices: Sequence[Outbox], name: str) -> list[tuple[Outbox, KnownSubscription]]:
    """Return the subscriptions in the databases that have the name. Raise ``ConfigError`` if there is none."""
    known: list[tuple[Outbox, KnownSubscription]] = []
    for outbox in choices:
        async with outbox.link("look up") as link:
            known += [(outbox, each) for each in await known_subscriptions(link, outbox.table)]
    require_known(name, [each.name for _, each in known])
    return [(outbox, each) for outbox, each in known if is_called(each.name, name)]


def is_called(full: str, name: str) -> bool:
    """Return whether a name, with or without namespace, is that of a subscription."""
    return name in (full, full.partition("/")[2])


def require_known(name: str, known: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless one of the known subscriptions has the name."""
    if not any(is_called(each, name) for each in known):
        names = ", ".join(known) or "none; a relay makes them when it first runs"
        raise ConfigError(f"the database knows no subscription {name}. It knows: {names}.")


def duration_option(name: str, *, default: str, help: str) -> Callable[[Command], Command]:
    """Return an option for a duration such as 720h. The command receives seconds."""
    seconds = parser(lambda text: Duration.parse(text).seconds)
    return click.option(name, type=seconds, metavar="DURATION", default=default, show_default=True, help=help)


def parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type for options that reports the text of a ``ValueError``. Click reports the value only."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return parsed
