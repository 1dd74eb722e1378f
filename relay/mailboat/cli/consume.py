"""``mailboat consume``: run an application's consumer."""

import sys
from importlib import import_module
from pathlib import Path

import click

from mailboat.cli.options import ManifestSource, with_logging, with_manifests
from mailboat.errors import ConfigError


@click.command(short_help="Run the handlers of a consumer.")
@with_manifests
@click.argument("target", metavar="MODULE:CONSUMER")
@click.option("--listen", metavar="ADDRESS", help="Address of /livez, /readyz, /status and /metrics, like :8080.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    help="Outbox: transactions at the same time. Source: events at the same time.",
)
@with_logging
def consume(source: ManifestSource, target: str, listen: str | None, concurrency: int | None) -> None:
    """Run the handlers of a subscription until SIGTERM or SIGINT: one with sink pull, or one with a source.

    MODULE:CONSUMER names a mailboat.Consumer, as in shop.billing:consumer; the module is looked for in the current
    folder first. At the first signal, running handlers finish and their transactions commit.
    """
    from mailboat.consumer import Consumer  # large, and the list of commands imports this module

    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{target} names no consumer: write module:consumer, as in shop.billing:consumer.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # a missing dependency of the application
        raise ConfigError(f"{target}: there is no module {module} here: start it in the folder that has it.") from error
    if not isinstance(found, Consumer):
        raise ConfigError(f"{target}: {module} has no mailboat.Consumer called {name}.")
    found.configure(manifests=source.files, secrets_dir=source.secrets_dir, listen=listen, concurrency=concurrency)
    found.run()
