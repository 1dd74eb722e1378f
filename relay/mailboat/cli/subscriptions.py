"""``pause``, ``resume``, ``forget``: commands for one subscription."""

from __future__ import annotations

import click

from mailboat.cli.options import ManifestSource, find_subscription, with_manifests
from mailboat.errors import ConfigError
from mailboat.store.admin.overview import forget as forget_subscription
from mailboat.store.admin.overview import relays_serving, set_state


@click.command()
@click.argument("name")
@with_manifests
@click.option("--reason", help="Why, for those who find it paused.")
async def pause(source: ManifestSource, name: str, reason: str | None) -> None:
    """Stop delivering to subscription NAME; nothing is lost.

    The same as: update mailboat.subscriptions set state = 'Paused' where name = ...
    """
    await _set_state(source, name, "Paused", reason)


@click.command()
@click.argument("name")
@with_manifests
async def resume(source: ManifestSource, name: str) -> None:
    """Go on delivering to subscription NAME, where it stopped."""
    await _set_state(source, name, "Running", None)


async def _set_state(source: ManifestSource, name: str, state: str, reason: str | None) -> None:
    outbox, known = await find_subscription(source.outboxes(), name)
    verb = "paused" if state == "Paused" else "running"
    if known.state == state and reason is None:
        click.echo(f"{known.name} was {verb} already")
        return
    async with outbox.link(verb) as link:
        await set_state(link, outbox.table, known.name, state, reason)
    click.echo(f"{known.name} is {verb}; relays follow within a second or two")


@click.command(short_help="Delete a subscription's progress and events.")
@click.argument("name")
@with_manifests
@click.option("--yes", is_flag=True, help="Yes, delete its progress, its parked events and its dead letters.")
async def forget(source: ManifestSource, name: str, yes: bool) -> None:
    """Delete subscription NAME from the database: progress, parked events and dead letters.

    For a subscription whose manifest is gone. If it is created again later, it begins at its start; without this
    command it would continue, up to 24 hours after it was deleted. One that a relay still has in its manifests would be
    created again at once: that is refused.
    """
    outbox, known = await find_subscription(source.outboxes(), name)
    async with outbox.link("forget") as link:
        if relays := await relays_serving(link, outbox.table, known.name):
            raise ConfigError(
                f"{known.name} is served by {', '.join(relays)}, which would create it and deliver everything again."
                " Remove its manifest there first and wait for the next heartbeat of the relay, or stop the relay."
            )
        if not yes:
            raise ConfigError(f"this deletes the progress, parked events and dead letters of {known.name}: say --yes.")
        await forget_subscription(link, outbox.table, known.name)
    click.echo(f"{known.name} is forgotten")
