"""``mailboat status``: an overview of subscriptions, once or live."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mailboat.cli.options import MANIFESTS_VARIABLE, PATH, Outbox, outboxes, outboxes_of, secrets_option
from mailboat.cli.printing import columns, counted
from mailboat.cli.statuslines import (
    HEADER,
    StatusLine,
    enriched,
    from_consumers,
    from_database,
    from_relays,
    not_started,
)
from mailboat.errors import DatabaseUnavailable
from mailboat.http.client import Answer, ask
from mailboat.outbox.overview import known_relays, known_subscriptions, waiting
from mailboat.runtime.config import load
from mailboat.runtime.secrets import find_secrets
from mailboat.terminals import safe
from mailboat_spec import full_name

_RIGHT = {"PARTITIONS", "LAG", "OLDEST", "PARKED", "DEAD", "RATE"}
_COLOURS = {"True": "green", "Paused": "yellow", "False": "red", "Failed": "red", "Deleted": "yellow"}


@dataclass(frozen=True, slots=True)
class Overview:
    """Content of one output of ``mailboat status``."""

    lines: tuple[StatusLine, ...]
    remarks: tuple[str, ...]
    """Messages about relays with errors or without a response."""
    relays: tuple[dict[str, Any], ...]
    away: int = 0
    """Number of unavailable databases."""


@click.command(short_help="Show subscriptions at a glance, once or live.")
@click.option(
    "-f",
    "--file",
    "files",
    type=PATH,
    multiple=True,
    envvar=MANIFESTS_VARIABLE,
    help=f"Manifest or folder: asks the database, and the relays it knows. [default: ${MANIFESTS_VARIABLE}]",
)
@secrets_option
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="URL",
    help="Ask this relay or consumer, without a database. May be given again.",
)
@click.option("--watch", is_flag=True, help="Show it again and again, until interrupted.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds, for --watch."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON document (with --watch: one per line).")
def status(
    files: tuple[Path, ...],
    secrets_dir: Path | None,
    urls: tuple[str, ...],
    watch: bool,
    interval: float,
    as_json: bool,
) -> None:
    """Show subscriptions: who is ready, how far behind, what is parked and dead.

    With -f it works even while no relay runs. LAG counts up to a bound, and then says so (100000+). RATE and the state
    of sinks come from relays, and are "-" where none answers.
    """
    if urls and click.get_current_context().get_parameter_source("files") is ParameterSource.ENVIRONMENT:
        files = ()
    if bool(files) == bool(urls):
        raise click.UsageError("give either -f or --url")
    chosen, elsewhere = _chosen(files, secrets_dir) if files else ([], [])
    try:
        asyncio.run(_show(chosen, urls, interval if watch else None, as_json, elsewhere))
    except KeyboardInterrupt:
        if not watch:
            raise


def _chosen(files: Sequence[Path], secrets_dir: Path | None) -> tuple[list[Outbox], list[str]]:
    """Return the outboxes of the manifests, and remarks about subscriptions that read a broker."""
    manifests = load(files, needs_relay=False)
    consumed = [each for each in manifests.subscriptions if each.spec.source is not None]
    if not consumed:
        return outboxes(files, secrets_dir), []
    remarks = [
        f"{full_name(each)} reads {each.spec.source_name}: its consumers run in the application; ask them with --url,"
        " or kubectl get evs"
        for each in consumed
    ]
    return outboxes_of(manifests, find_secrets(secrets_dir, os.environ)), remarks


async def _show(
    chosen: Sequence[Outbox], urls: Sequence[str], every: float | None, as_json: bool, elsewhere: Sequence[str]
) -> None:
    console = Console()
    if console.is_terminal and not as_json and every is not None:
        with Live(console=console, screen=False, auto_refresh=False) as live:
            while True:
                live.update(as_table(await _overview_or_trouble(chosen, urls, elsewhere)), refresh=True)
                await asyncio.sleep(every)
    while True:
        overview = await (_overview if every is None else _overview_or_trouble)(chosen, urls, elsewhere)
        if as_json:
            click.echo(_json(overview, indent=None if every is not None else 2))
        elif console.is_terminal:
            console.print(as_table(overview))
        else:
            click.echo("\n".join([*columns(HEADER, (line.cells() for line in overview.lines)), *overview.remarks]))
        if every is None:
            if overview.away:
                raise DatabaseUnavailable(f"{overview.away} of {counted(len(chosen), 'database')} could not be asked.")
            return
        await asyncio.sleep(every)


async def _overview_or_trouble(chosen: Sequence[Outbox], urls: Sequence[str], elsewhere: Sequence[str]) -> Overview:
    """Return the overview or, for a live view that must continue, an overview with the error."""
    try:
        return await _overview(chosen, urls, elsewhere)
    except DatabaseUnavailable as error:
        return Overview((), tuple(safe(line) for line in str(error).splitlines()), ())


async def _overview(chosen: Sequence[Outbox], urls: Sequence[str], elsewhere: Sequence[str]) -> Overview:
    if urls:
        answers = await ask(urls)
        if all(answer.error for answer in answers):
            raise DatabaseUnavailable("\n".join(_silence(answer) for answer in answers))
        relays = [relay for answer in answers for relay in answer.relays]
        lines = from_relays(relays)
        names = {line.name for line in lines}
        consumed = from_consumers(report for answer in answers for report in answer.consumers)
        lines = sorted([*lines, *(line for line in consumed if line.name not in names)], key=lambda line: line.name)
        return Overview(tuple(lines), tuple(_remarks(answers)), tuple(relays))
    lines = []
    remarks: list[str] = [*elsewhere]
    documents: list[dict[str, Any]] = []
    away: list[str] = []
    for outbox in chosen:
        try:
            own_lines, answers = await _look(outbox)
        except DatabaseUnavailable as error:  # still show the other outboxes
            away.append(str(error))
            continue
        lines += own_lines
        remarks += _remarks(answers)
        documents += [relay for answer in answers for relay in answer.relays]
    if away and len(away) == len(chosen):
        raise DatabaseUnavailable("\n".join(away))
    remarks += [safe(" ".join(each.split())) for each in away]
    return Overview(tuple(lines), tuple(dict.fromkeys(remarks)), tuple(documents), len(away))


async def _look(outbox: Outbox) -> tuple[list[StatusLine], list[Answer]]:
    async with outbox.link("status") as link:
        known = await known_subscriptions(link, outbox.table)
        relays = await known_relays(link, outbox.table)
        lines = [
            from_database(each, await waiting(link, outbox.layout, each, outbox.subscriptions), outbox.subscriptions)
            for each in known
        ]
    answers = await ask(sorted({relay.address for relay in relays if relay.address}))
    told = from_relays(relay for answer in answers for relay in answer.relays)
    names = {each.name for each in known}
    lines = [enriched(line, told) for line in lines]
    fresh = [not_started(each) for each in outbox.subscriptions if full_name(each) not in names]
    lines += [enriched(line, told) for line in fresh]
    return sorted(lines, key=lambda line: line.name), answers


def _remarks(answers: Sequence[Answer]) -> list[str]:
    silent = [_silence(answer) for answer in answers if answer.error]
    troubled = [
        safe(f"relay {relay.get('relay')} ({relay.get('name')}): {relay.get('state')}: {relay.get('message')}")
        for answer in answers
        for relay in answer.relays
        if relay.get("state") != "Running" or relay.get("message")
    ]
    refusing = [
        safe(f"the relay at {answer.url} goes on with its old configuration: {answer.config_error}")
        for answer in answers
        if answer.config_error
    ]
    return silent + troubled + refusing


def _silence(answer: Answer) -> str:
    return safe(f"no status from {answer.url}: {answer.error}")


def as_table(overview: Overview) -> Table:
    """Format an overview for a terminal."""
    table = Table(
        box=None,
        pad_edge=False,
        caption=Text("\n".join(overview.remarks)) if overview.remarks else None,
        caption_justify="left",
    )
    *narrow, error = HEADER
    for name in narrow:  # cells that users copy must not be wrapped; in a narrow terminal only errors are folded
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold", no_wrap=True)
    table.add_column(error, overflow="fold", min_width=len(error))
    for line in overview.lines:
        ready, *rest = line.cells()
        table.add_row(Text(ready, style=_COLOURS[ready]), *(Text(safe(cell)) for cell in rest))
    return table


def _json(overview: Overview, indent: int | None) -> str:
    document = {
        "subscriptions": [line.as_json() for line in overview.lines],
        "relays": list(overview.relays),
        "remarks": list(overview.remarks),
    }
    return json.dumps(document, indent=indent, ensure_ascii=False)
