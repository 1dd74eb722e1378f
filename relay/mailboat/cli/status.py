"""``mailboat status``: an overview of subscriptions, once or live."""

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mailboat.cli import status_rows
from mailboat.cli.options import ManifestSource, Outbox, duration_option, is_called, require_known, with_manifests
from mailboat.cli.output import age, counted, safe
from mailboat.cli.status_rows import StatusLine
from mailboat.errors import DatabaseUnavailable, MailboatError
from mailboat.http.client import StatusResponse, fetch_statuses
from mailboat.runtime.manifest_files import load
from mailboat.store.admin.overview import backlog, known_subscriptions, relay_addresses
from mailboat.store.examination import coverage
from mailboat_spec import EventSubscription, full_name

_COLOURS = {"True": "green", "Paused": "yellow", "False": "red", "Failed": "red", "Deleted": "yellow"}


@dataclass(frozen=True, slots=True)
class Overview:
    lines: Sequence[StatusLine] = ()
    remarks: Sequence[str] = ()
    """Messages about relays with errors or without a response."""
    relays: Sequence[dict[str, Any]] = ()
    unavailable: Sequence[str] = ()
    """An error for each unavailable database."""


@click.command(short_help="Show subscriptions at a glance, once or live.")
@click.argument("name", required=False)
@with_manifests
@click.option(
    "--url",
    "urls",
    multiple=True,
    is_eager=True,  # parsed before -f, whose default does not apply then
    metavar="URL",
    help="Query this relay or consumer, without manifests and database. May be given again.",
)
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds, for --watch and --wait.",
)
@click.option("--wait", is_flag=True, help="Wait until all are ready and nothing waits (LAG and PARKED 0).")
@duration_option("--timeout", default="5m", help="For --wait: exit code 1 after this time; 0s checks once.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON document (with --watch: one per line).")
@click.pass_context
def status(
    context: click.Context,
    source: ManifestSource,
    name: str | None,
    urls: tuple[str, ...],
    watch: bool,
    interval: float,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Show subscriptions: readiness, lag, parked events and dead letters.

    With NAME: everything about one subscription, with the owner of every partition and the whole last error.

    Works even while no relay runs. LAG is counted up to a bound, then shown with a plus sign (100000+). RATE and the
    state of sinks come from relays, and are "-" if no relay answers. LAST ERROR disappears once delivery succeeds.

    \b
    Examples:
      mailboat status -f manifests/
      mailboat status orders-to-kafka
      mailboat status --wait --timeout 60s && echo delivered
      mailboat status --json | jq '.subscriptions[] | select(.ready | not)'
    """
    given = context.get_parameter_source("files") is ParameterSource.COMMANDLINE
    if (given and urls) or (watch and wait):
        raise click.UsageError("give either -f or --url" if urls else "give either --watch or --wait")
    manifests = () if urls else load(source.files, needs_relay=False).subscriptions
    consumed = [each for each in manifests if each.spec.source is not None]
    chosen = [] if urls else source.outboxes(needs_relay=not consumed)
    view = StatusQuery(chosen, urls, consumed, name)
    if wait:
        asyncio.run(_wait(view, interval, timeout, as_json))
    elif watch:
        with suppress(KeyboardInterrupt):
            asyncio.run(_watch(view, interval, as_json))
    else:
        asyncio.run(_show(view, as_json))


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """What is asked, and which subscription is shown (None: all)."""

    chosen: Sequence[Outbox]
    urls: Sequence[str]
    consumed: Sequence[EventSubscription]
    """Subscriptions that read a broker, so no database knows them."""
    name: str | None

    async def overview(self) -> Overview:
        overview = await (_of_urls(self.urls) if self.urls else _of_databases(self.chosen))
        lines = [line for line in overview.lines if self._shows(line.name)]
        remarks = [
            f"{full_name(each)} reads {each.spec.source_name}: its consumers run in the application;"
            " ask them with --url, or kubectl get evs"
            for each in self.consumed
            if self._shows(full_name(each))
        ]
        if self.name is not None and not remarks and not overview.unavailable:
            require_known(self.name, [line.name for line in overview.lines])
        return replace(overview, lines=lines, remarks=(*remarks, *overview.remarks))

    def _shows(self, name: str) -> bool:
        return self.name is None or is_called(name, self.name)

    async def overview_or_error(self) -> Overview:
        """Return the overview or, for a live view that must continue, an overview with the error."""
        try:
            return await self.overview()
        except DatabaseUnavailable as error:
            return Overview(remarks=[safe(line) for line in str(error).splitlines()])

    def text(self, overview: Overview) -> list[str]:
        if self.name is not None:
            return [text for line in overview.lines for text in status_rows.details_text(line)] + list(overview.remarks)
        width = max(80, shutil.get_terminal_size().columns)
        return [*status_rows.overview_text(overview.lines, width), *overview.remarks]


async def _show(view: StatusQuery, as_json: bool) -> None:
    overview = await view.overview()
    _print(view, overview, as_json)
    if overview.unavailable:
        databases = counted(len(view.chosen), "database")
        raise DatabaseUnavailable(f"{len(overview.unavailable)} of {databases} could not be asked.")


async def _watch(view: StatusQuery, every: float, as_json: bool) -> None:
    console = Console()
    with Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else nullcontext() as live:
        while True:
            overview = await view.overview_or_error()
            if live is not None:
                live.update(coloured(view.text(overview)), refresh=True)
            else:
                _print(view, overview, as_json, indent=None)
            await asyncio.sleep(every)


async def _wait(view: StatusQuery, every: float, timeout: float, as_json: bool) -> None:
    """Print the overview once all subscriptions are ready and caught up. Raise `MailboatError` after the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        overview = await view.overview_or_error()
        waited_for = [line for line in overview.lines if not line.orphaned and line.state != "Deleted"]
        late = [line.name for line in waited_for if not (line.ready and line.lag == 0 and line.parked == 0)]
        done = bool(waited_for) and not late and not overview.unavailable
        if done or time.monotonic() >= deadline:
            break
        await asyncio.sleep(min(every, max(0.0, deadline - time.monotonic())))
    _print(view, overview, as_json)
    if not done:
        names = ", ".join(late) or "no subscription"
        raise MailboatError(f"after {age(timeout)} not ready, or with events that wait: {names}.")


def _print(view: StatusQuery, overview: Overview, as_json: bool, indent: int | None = 2) -> None:
    if as_json:
        document = {
            "subscriptions": [line.as_json() for line in overview.lines],
            "relays": overview.relays,
            "remarks": overview.remarks,
        }
        click.echo(json.dumps(document, indent=indent, ensure_ascii=False))
    else:
        Console().print(coloured(view.text(overview)), soft_wrap=True)


async def _of_urls(urls: Sequence[str]) -> Overview:
    responses = await fetch_statuses(urls)
    if all(response.error for response in responses):
        raise DatabaseUnavailable("\n".join(_remarks(responses)))
    relays = _relays(responses)
    consumed = status_rows.from_consumers(report for response in responses for report in response.consumers)
    lines = {line.name: line for line in (*consumed, *status_rows.from_relays(relays))}
    return Overview([lines[name] for name in sorted(lines)], _remarks(responses), relays)


async def _of_databases(chosen: Sequence[Outbox]) -> Overview:
    found: list[Overview] = []
    unavailable: list[str] = []
    for outbox in chosen:
        try:
            found.append(await _of_outbox(outbox))
        except DatabaseUnavailable as error:  # still show the other outboxes
            unavailable.append(str(error))
    if unavailable and not found:
        raise DatabaseUnavailable("\n".join(unavailable))
    lines = [line for each in found for line in each.lines]
    remarks = [remark for each in found for remark in each.remarks]
    remarks += [safe(" ".join(each.split())) for each in unavailable]
    return Overview(lines, [*dict.fromkeys(remarks)], [relay for each in found for relay in each.relays], unavailable)


async def _of_outbox(outbox: Outbox) -> Overview:
    manifests = outbox.subscriptions
    found = {full_name(each): status_rows.not_started(each) for each in manifests}
    async with outbox.link("status") as link:
        addresses = await relay_addresses(link, outbox.table)
        for known in await known_subscriptions(link, outbox.table):
            waiting = await backlog(link, outbox.layout, known, manifests)
            found[known.name] = status_rows.from_database(known, waiting, manifests)
        remarks = (await coverage(link, outbox.layout, manifests)).remarks()
    responses = await fetch_statuses(addresses)
    relays = _relays(responses)
    reported = {line.name: line for line in status_rows.from_relays(relays)}
    lines = [status_rows.enriched(found[name], reported.get(name)) for name in sorted(found)]
    return Overview(lines, [*_remarks(responses), *map(safe, remarks)], relays)


def _relays(responses: Sequence[StatusResponse]) -> list[dict[str, Any]]:
    return [relay for response in responses for relay in response.relays]


def _remarks(responses: Sequence[StatusResponse]) -> list[str]:
    remarks = [f"no status from {response.url}: {response.error}" for response in responses if response.error]
    remarks += [
        f"relay {relay.get('relay')} ({relay.get('name')}): {relay.get('state')}: {relay.get('message')}"
        for relay in _relays(responses)
        if relay.get("state") != "Running" or relay.get("message")
    ]
    remarks += [
        f"the relay at {response.url} continues with its old configuration: {response.config_error}"
        for response in responses
        if response.config_error
    ]
    return [safe(remark) for remark in remarks]


def coloured(lines: Sequence[str]) -> Text:
    """Return the lines for a terminal, with the word of readiness in colour."""
    text = Text("\n".join(lines))
    for word, colour in _COLOURS.items():
        text.highlight_regex(rf"(?m)^(ready  +)?{word}(?=  )|^ready  +{word}$", colour)
    return text
