"""The command line: ``mailboat-operator run`` and ``mailboat-operator version``.

Exit codes: 0 stopped by a signal; 1 failed, or lost the lead; 2 invalid settings; 5 no cluster to connect to.
"""

import asyncio
import logging
import sys
from importlib.metadata import version as installed_version
from typing import Any, Final, NoReturn

import click
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from mailboat_operator.http_server import ListenFailed
from mailboat_operator.kube.errors import NoCluster
from mailboat_operator.leader_election import LeadershipLost
from mailboat_operator.process import Operator
from mailboat_operator.settings import SettingsError, options, read_settings
from mailboat_spec import structured_logs
from mailboat_spec.redaction import redact

log = logging.getLogger("mailboat_operator")

WRONG_SETTINGS: Final = 2
NO_CLUSTER: Final = 5


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """The Kubernetes operator of Mailboat: OutboxRelays and EventSubscriptions in, relays out."""


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(installed_version("mailboat-operator"))


@main.command(params=[*options()])
def run(**given: Any) -> None:
    """Reconcile and serve the injection webhook until SIGTERM or SIGINT.

    Every setting is a flag or an environment variable. Several may run: one of them leads, all serve the webhook.
    """
    try:
        settings = read_settings(given)
    except SettingsError as error:
        _fail(str(error), WRONG_SETTINGS)
    structured_logs.configure("mailboat_operator", settings.log_level, settings.log_format)
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    try:
        asyncio.run(Operator(settings, registry).run())
    except NoCluster as error:
        _fail(str(error), NO_CLUSTER)
    except ListenFailed as error:
        _fail(str(error), 1)
    except LeadershipLost as error:
        log.error("Lost leader election lease, restarting", extra={"reason": str(error)})
        sys.exit(1)
    except Exception:
        log.critical("Operator failed unexpectedly", exc_info=True)
        sys.exit(1)


def _fail(message: str, code: int) -> NoReturn:
    for line in redact(message).splitlines():
        click.echo(f"mailboat-operator: {line}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
