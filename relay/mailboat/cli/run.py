"""``mailboat run``: relays for all manifests, with their HTTP side, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets as random_tokens
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import click

from mailboat.cli.following import follow_file
from mailboat.cli.options import Outbox, outboxes_of, with_manifests
from mailboat.errors import ConfigError, MailboatError
from mailboat.http.assignment import Assign
from mailboat.http.server import HttpServer, Surface, parse_address
from mailboat.logs import LogFormat, configure
from mailboat.outbox.leases import RelayIdentity
from mailboat.runtime.config import load
from mailboat.runtime.garbage import settle_collector
from mailboat.runtime.relay import Relay
from mailboat.runtime.secrets import find_secrets
from mailboat_spec import full_name

log = logging.getLogger("mailboat.run")


@click.command()
@with_manifests
@click.option("--relay-id", metavar="ID", help="Name of this relay, unique per database. [default: host name + random]")
@click.option(
    "--listen", default="127.0.0.1:8080", show_default=True, help="Address of /status etc.; port 0: any free one."
)
@click.option(
    "--control-token-file",
    type=click.Path(path_type=Path),
    help="File with the token that PUT /assignment must bring. Without it there are no assignments over HTTP.",
)
@click.option(
    "--assignment", type=click.Path(path_type=Path), help="JSON file that says which relay moves what; watched."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is worth a line.",
)
@click.option(
    "--log-format",
    type=click.Choice([each.value for each in LogFormat]),
    default=LogFormat.AUTO.value,
    show_default=True,
    help="auto: readable on a terminal, JSON lines elsewhere. Goes to standard error.",
)
def run(
    files: tuple[Path, ...],
    secrets_dir: Path | None,
    relay_id: str | None,
    listen: str,
    control_token_file: Path | None,
    assignment: Path | None,
    log_level: str,
    log_format: str,
) -> None:
    """Move events until SIGTERM or SIGINT.

    The first signal ends it in good order: batches in hand are finished, progress is written, partitions are released.
    The second one ends it at once. A database or a destination that is away is waited for.
    """
    configure(log_level, LogFormat(log_format))
    manifests = load(files)
    if control_token_file is not None and not control_token_file.is_file():
        raise ConfigError(f"--control-token-file: {control_token_file} is no file. Write the token into it first.")
    host, port = parse_address(listen)
    served = outboxes_of(manifests, find_secrets(secrets_dir, os.environ))
    relay_id = relay_id or f"{socket.gethostname()}-{random_tokens.token_hex(3)}"
    settle_collector()
    try:
        asyncio.run(_run(served, relay_id, (host, port), control_token_file, assignment))
    except MailboatError:
        raise
    except Exception:
        log.critical("The relay failed in a way that nobody thought of.", exc_info=True)  # for those who read logs
        raise


async def _run(
    served: Sequence[Outbox], relay_id: str, listen: tuple[str, int], token_file: Path | None, assignment: Path | None
) -> None:
    stop = asyncio.Event()
    server = HttpServer.bind(*listen)
    try:
        relays = [_relay(outbox, _own_id(relay_id, outbox, len(served)), server.address) for outbox in served]
        assign = assign_to(relays)
        await server.start(Surface(lambda: [each.status() for each in relays], assign, token_file, stop.is_set))
        log.info(
            "Listening.", extra={"address": server.address, "id": relay_id, "relays": [each.name for each in relays]}
        )
        _stop_on_signals(stop)
        following = asyncio.create_task(follow_file(assignment, assign)) if assignment is not None else None
        try:
            await _run_all(relays, stop)
        finally:
            if following is not None:
                following.cancel()
    finally:
        await server.close()
    log.info("Stopped.", extra={"id": relay_id})


def _own_id(relay_id: str, outbox: Outbox, relays: int) -> str:
    """Two relays of one process may share a database, in which ids are unique."""
    return relay_id if relays == 1 else f"{relay_id}/{full_name(outbox.relay)}"


def _relay(outbox: Outbox, relay_id: str, address: str) -> Relay:
    identity = RelayIdentity(relay_id, str(uuid.uuid4()), address)
    if not outbox.subscriptions:
        log.warning(
            "No EventSubscription refers to this relay: it moves nothing.", extra={"relay": full_name(outbox.relay)}
        )
    return Relay(outbox.relay, outbox.subscriptions, secrets=outbox.secrets, identity=identity)


def assign_to(relays: Sequence[Relay]) -> Assign:
    """An assignment goes to the relay that has the subscription."""

    async def assign(name: str, generation: int, owners: dict[int, str]) -> bool:
        for relay in relays:
            try:
                return await relay.assign(name, generation, owners)
            except LookupError:
                continue
        raise LookupError(name)

    return assign


async def _run_all(relays: Sequence[Relay], stop: asyncio.Event) -> None:
    """Until all have stopped. One that gives up stops the others, in good order, and is the reason in the end."""

    async def run_one(relay: Relay) -> None:
        try:
            await relay.run(stop)
        finally:
            stop.set()

    for ended in await asyncio.gather(*(run_one(relay) for relay in relays), return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop_now(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("Stopping at once.", extra={"signal": number.name})
            sys.stderr.flush()
            os._exit(128 + number)
        log.info("Stopping in good order; a second signal stops at once.", extra={"signal": number.name})
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_now, number)
