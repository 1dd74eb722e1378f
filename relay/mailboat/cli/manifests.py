"""``init``, ``check``, ``match``, ``schema``, ``debug``: write and examine manifests, without database and Secrets."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click

from mailboat.cli.options import DEFAULT_MANIFEST, PATH, ManifestSource, manifest_option, manifests_of
from mailboat.cli.output import columns, counted, safe
from mailboat.errors import ConfigError
from mailboat.runtime.manifest_files import warnings
from mailboat.store.debug_sql import psql_script
from mailboat_spec import EventSubscription, full_name

_SINKS: Final = {
    "log": "log: {}",
    "kafka": 'kafka: {bootstrapServers: ["localhost:9092"], topic: NAME}',
    "pubsub": "pubsub: {project: my-project, topic: NAME}",
    "pull": "pull: {}",
}
_TEMPLATE: Final = """\
# yaml-language-server: $schema=mailboat.schema.json
# (`mailboat schema > mailboat.schema.json` lets an editor complete and check the fields.)
apiVersion: mailboat.dev/v1alpha1
kind: OutboxRelay
metadata: {name: NAME, namespace: NAMESPACE}
spec:
  database:
    urlSecretRef: {name: NAME-db, key: url}   # $VARIABLE
---
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {name: NAME-to-KIND, namespace: NAMESPACE}
spec:
  relayRef: {name: NAME}
  filter: {eventTypes: ["*"]}                 # for example ["order.*"]
  sink:
    SINK
"""
_NEXT: Final = """\
wrote {path}. Next:

  export {variable}=postgresql://user:password@localhost:5432/dbname
  mailboat check                            # needs no database
  mailboat migrate
  mailboat run &
  mailboat emit order.placed '{{"order": "o-1"}}' --key o-1
  mailboat status --wait
"""


@click.command(short_help="Write a first manifest to this folder.")
@click.argument("path", type=PATH, default=DEFAULT_MANIFEST)
@click.option("--name", default="orders", show_default=True, help="Name of the OutboxRelay.")
@click.option("--namespace", default="default", show_default=True, help="Namespace of both resources.")
@click.option("--sink", type=click.Choice(list(_SINKS)), default="log", show_default=True, help="Where events go.")
def init(path: Path, name: str, namespace: str, sink: str) -> None:
    """Write a manifest with one OutboxRelay and one EventSubscription to PATH (mailboat.yaml; - prints it).

    Commands read mailboat.yaml of the current folder if they get no -f. An existing file is never overwritten.

    \b
    Examples:
      mailboat init
      mailboat init --name billing --sink kafka
    """
    variable = f"MAILBOAT_SECRET_{name.upper().replace('-', '_').replace('.', '_')}_DB_URL"
    text = _TEMPLATE.replace("SINK", _SINKS[sink]).replace("KIND", sink).replace("VARIABLE", variable)
    text = text.replace("NAMESPACE", namespace).replace("NAME", name)
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already and stays as it is. Give another path, or - to print it.") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from error
    click.echo(_NEXT.format(path=path, variable=variable), nl=False)


@click.command(short_help="Check manifests; needs no database and no Secret.")
@manifest_option
@click.option("--strict", is_flag=True, help="Exit with code 3 for warnings, too.")
def check(files: tuple[Path, ...], strict: bool) -> None:
    """Check manifests as `run` and the operator do, without a database, a broker or a Secret.

    Errors end it with exit code 3, with file, field and remedy. Warnings are about what is valid and probably not
    meant, such as a filter that looks like a regular expression.

    \b
    Examples:
      mailboat check -f manifests/
      helm template my-chart | mailboat check -f -
    """
    manifests = manifests_of(files)
    for relay in manifests.relays:
        click.echo(safe(f"OutboxRelay {full_name(relay)}: ok"))
    for subscription in manifests.subscriptions:
        click.echo(safe(f"EventSubscription {full_name(subscription)}: ok"))
    found = warnings(manifests)
    for warning in found:
        click.echo(safe(f"warning: {warning}"), err=True)
    if found and strict:
        raise ConfigError(f"{counted(len(found), 'warning')}, and --strict was given.")


@click.command(short_help="Show which subscriptions take an event.")
@click.argument("type")
@manifest_option
@click.option("--aggregate-type", help="Kind of thing the event is about.")
@click.option("--tag", "tags", multiple=True, help="Tag of the event. May be given again.")
def match(type: str, files: tuple[Path, ...], aggregate_type: str | None, tags: tuple[str, ...]) -> None:
    """Show which subscriptions take an event of TYPE, and why others do not. Exit code 1 if none does.

    \b
    Examples:
      mailboat match order.placed
      mailboat match order.placed --aggregate-type order --tag eu
    """
    reasons = {
        full_name(each): mismatch(each, type, aggregate_type, tags) for each in manifests_of(files).subscriptions
    }
    rows = [(name, "no" if reason else "yes", reason) for name, reason in reasons.items()]
    click.echo("\n".join(columns(("SUBSCRIPTION", "TAKES IT", "WHY NOT"), rows)))
    if all(reasons.values()):
        sys.exit(1)


def mismatch(subscription: EventSubscription, type: str, aggregate_type: str | None, tags: Iterable[str]) -> str:
    """Return why a subscription does not take an event; empty if it does."""
    filter_, has = subscription.spec.filter, {*tags}
    fields = (("eventTypes", filter_.event_types, type), ("aggregateTypes", filter_.aggregate_types, aggregate_type))
    for field, patterns, value in fields:
        if patterns and (value is None or not any(pattern.matches(value) for pattern in patterns)):
            return f"{field}: {', '.join(map(str, patterns))}"
    if missing := sorted({*filter_.tags.all_of} - has):
        return f"tags.allOf: {', '.join(missing)} missing"
    if filter_.tags.any_of and not has & {*filter_.tags.any_of}:
        return f"tags.anyOf: none of {', '.join(filter_.tags.any_of)}"
    if excluded := sorted(has & {*filter_.tags.none_of}):
        return f"tags.noneOf: has {', '.join(excluded)}"
    return ""


@click.command(short_help="Print the JSON Schema of manifests, for editors.")
def schema() -> None:
    """Print the JSON Schema of both resources, for editors that complete and check YAML.

    \b
    Examples:
      mailboat schema > mailboat.schema.json
      # first line of a manifest, for the YAML language server:
      #   yaml-language-server: $schema=mailboat.schema.json
    """
    from mailboat_spec.crds import json_schema  # generates; needed by this command only

    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@click.group()
def debug() -> None:
    """Show how a relay works inside."""


@debug.command()
@manifest_option
def sql(files: tuple[Path, ...]) -> None:
    """Print the statements that a relay runs for these manifests, for psql.

    They read events and settle progress; filters and columns of the manifests are part of their text. Needs no
    database. To see a plan, write explain before a statement.
    """
    for outbox in ManifestSource(files).outboxes():
        script = psql_script(outbox.layout, outbox.subscriptions)
        about = f"-- OutboxRelay {full_name(outbox.relay)}, outbox {outbox.table}"
        click.echo(f"{about}\n{script}\n" if script else f"{about}: no subscription that a relay delivers")
