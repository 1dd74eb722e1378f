"""``mailboat run``: run relays for all manifests, with their HTTP server, until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets as random_tokens
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from mailboat.cli.options import PATH, with_logging, with_manifests
from mailboat.cli.process import RunOptions, run_relays
from mailboat.errors import ConfigError, MailboatError
from mailboat.http.auth import CallerAuth
from mailboat.http.server import parse_address
from mailboat.runtime.gc_settings import configure_gc
from mailboat.runtime.manifest_files import STANDARD_INPUT, load, warnings
from mailboat.runtime.secrets import existing_secrets_folder, find_secrets, secrets_folder
from mailboat_spec.structured_logs import LogFormat, configure

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
    files: tuple[Path, ...],
    secrets_dir: Path | None,
    relay_id: str | None,
    listen: str,
    advertise: str,
    follow: bool,
    control_keys: Path | None,
    audience: str | None,
    log_level: str,
    log_format: str,
) -> None:
    """Deliver events until SIGTERM or SIGINT.

    At the first signal, batches in flight are finished, progress is committed and partitions are released. The second
    signal ends the process at once. If a database or a destination is unavailable, the relay retries.
    """
    configure("mailboat", log_level, LogFormat(log_format))
    if (control_keys is None) != (audience is None):
        raise click.UsageError("--control-keys and --audience go together: a signed call names the relay it is for")
    if control_keys is not None and not follow and not control_keys.is_file():  # with --follow it may appear later
        raise ConfigError(f"--control-keys: {control_keys} is no file. Write the public keys into it first.")
    if follow and STANDARD_INPUT in files:
        raise click.UsageError("--follow watches files: it can't watch standard input (-f -)")
    manifests = None if follow else load(files)
    for warning in warnings(manifests) if manifests is not None else ():
        log.warning("Probably a mistake in a manifest: %s.", warning)
    options = RunOptions(
        files,
        (secrets_folder if follow else existing_secrets_folder)(secrets_dir, os.environ),
        find_secrets(secrets_dir, os.environ),
        relay_id or f"{socket.gethostname()}-{random_tokens.token_hex(3)}",
        parse_address(listen),
        _callers(control_keys, audience),
        advertise,
    )
    configure_gc()
    try:
        asyncio.run(run_relays(options, manifests))
    except MailboatError:
        raise
    except Exception:
        log.critical("Relay failed unexpectedly", exc_info=True)  # the CLI only prints it
        raise
    _exit()


def _exit() -> NoReturn:
    """Exit after a completed shutdown, without the exit handlers of C libraries.

    Threads of vendors' clients may outlast ``close`` by a moment. If such a thread still uses TLS while OpenSSL's exit
    handler frees its memory, a clean shutdown can end in a segmentation fault. A relay was seen to end in one, once;
    this cause is likely, not proven.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader may have closed the pipe
            stream.flush()
    os._exit(0)


def _callers(keys: Path | None, audience: str | None) -> CallerAuth:
    if keys is None or audience is None:
        return CallerAuth()
    from mailboat.http.jwt_auth import JwtVerifier  # large, needed only with --control-keys

    return CallerAuth(JwtVerifier(keys, audience))
