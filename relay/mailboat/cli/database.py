"""Commands that change a database: its schema and time partitions, or one of its subscriptions."""

from functools import cache

import click

from mailboat.cli.options import ManifestSource, Outbox, find_subscription, for_each_outbox, with_manifests
from mailboat.cli.output import counted, safe
from mailboat.errors import ConfigError
from mailboat.runtime.maintenance import RetentionClock, limits
from mailboat.store.admin import overview
from mailboat.store.cursor_changes import rebase as rebase_cursors
from mailboat.store.schema.migrate import apply_migrations, migration_script, pending_migrations
from mailboat.store.schema.time_partitions import RetentionSweep, days_ahead, ensure_partitions, server_time
from mailboat.store.schema.verify import undeliverable_rows, verify_or_refuse
from mailboat.store.subscription_rows import clear_expired, declare_pulled
from mailboat_spec import full_name


@click.command()
@with_manifests
@click.option("--dry-run", is_flag=True, help="List the pending migrations, and change nothing.")
@click.option("--sql", is_flag=True, help="Print the pending migrations as SQL for psql, and change nothing.")
async def migrate(source: ManifestSource, dry_run: bool, sql: bool) -> None:
    """Create or upgrade the outbox and Mailboat's tables.

    Also declares the pull subscriptions of the manifests, so that consumers can begin without a relay. May be run any
    number of times, also concurrently. With manageSchema: false in the manifest, the schema is only verified; --sql
    prints the statements for its administrator.
    """
    migrated: set[tuple[int, str]] = set()
    for outbox in source.outboxes():
        if sql:
            async with outbox.link("migrate") as link:
                script = await migration_script(link, outbox.table, migrated)
            about = f"-- {full_name(outbox.relay)}, outbox {outbox.table}"
            click.echo(f"{about}\n\n{script}\n" if script else f"{about}: nothing to apply")
        else:
            await _migrate(outbox, dry_run)


async def _migrate(outbox: Outbox, dry_run: bool) -> None:
    if not outbox.relay.spec.outbox.manage_schema:
        return await _verify(outbox)
    print_once = cache(lambda reason: _print(outbox, reason))
    async with outbox.link("migrate") as link:
        if dry_run:
            steps = await pending_migrations(link)
            names = ", ".join(step.name for step in steps)
            return _print(outbox, f"would apply {names}" if steps else "nothing to apply")
        report = await apply_migrations(link.connection, outbox.table, waits=print_once)
        pulled = await declare_pulled(link, outbox.layout, outbox.subscriptions)
    _print(outbox, f"applied {', '.join(report.applied)}" if report.applied else "the schema was up to date")
    _print(outbox, f"outbox {report.outbox} is ready")
    for subscription in pulled:
        _print(outbox, f"subscription {subscription} can be pulled")
    if report.sql_for_an_administrator:
        _print(outbox, "this user may not create roles; an administrator should run:")
        click.echo(report.sql_for_an_administrator)


@click.command(short_help="Check the schema; print the SQL that is missing.")
@for_each_outbox
async def verify(outbox: Outbox) -> None:
    """Check that the database has all that Mailboat needs; print SQL for missing parts. Changes nothing."""
    await _verify(outbox)


async def _verify(outbox: Outbox) -> None:
    async with outbox.link("verify") as link:
        await verify_or_refuse(link.connection, outbox.layout)
        undeliverable = await undeliverable_rows(link.connection, outbox.layout)
    _print(outbox, f"outbox {outbox.table} has all that Mailboat needs")
    if undeliverable is not None:
        click.echo(safe(str(undeliverable), lines=True))


@click.command()
@for_each_outbox
async def maintain(outbox: Outbox) -> None:
    """Create time partitions ahead and drop expired ones, once.

    The progress of subscriptions that were deleted more than 24 hours ago is removed, too.

    Relays do the same every hour. Use this command if the relay lacks the privileges, or to see why retention is
    blocked.
    """
    async with outbox.link("maintain") as link:
        made = await ensure_partitions(link.connection, outbox.table)
        cleared = await clear_expired(link, outbox.table)
        now = RetentionClock().now(await server_time(link.connection))
        after, limit = limits(outbox.relay.spec.outbox.retention, now)
        report = await RetentionSweep(link.connection, outbox.layout, after, now=now, limit=limit).run()
        if report.dropped:
            made += await ensure_partitions(link.connection, outbox.table)
        days = await days_ahead(link.connection, outbox.table)
    for subscription in cleared:
        _print(outbox, f"the progress of {subscription} is removed, which was deleted more than 24 hours ago")
    if days is None:
        return _print(outbox, f"{outbox.table} is not partitioned by time: what is old in it is its owner's to delete")
    _print(outbox, f"{counted(made, 'partition')} made; there are some for {int(days)} days ahead")
    names = f": {', '.join(report.dropped)}" if report.dropped else ""
    _print(outbox, f"{counted(len(report.dropped), 'partition')} dropped{names}")
    for blocked in report.blocked:
        _print(outbox, f"kept {blocked}")
    for lost in report.lost:
        least = "at least " if lost.at_least else ""
        _print(outbox, f"{lost.subscription} lost {least}{counted(lost.events, 'event')} with {lost.partition}")


@click.command()
@for_each_outbox
@click.option("--yes", is_flag=True, help="Confirm that delivery continues in this copy.")
@click.option("--same-history", is_flag=True, help="The server was upgraded by pg_upgrade: keep all progress.")
async def rebase(outbox: Outbox, yes: bool, same_history: bool) -> None:
    """Continue in a copy of the database, or after pg_upgrade.

    Progress belongs to one database system. In a copy, delivery continues after the highest settled position. An
    undelivered event with a lower position is not sent. Stop all relays first.

    With --same-history all progress is kept and nothing is skipped. That is for a server made by pg_upgrade, where
    transaction ids continue. The command checks this and refuses other servers.
    """
    if not (yes or same_history):
        raise ConfigError(
            "rebase skips events below the highest settled position that were never delivered: those of transactions"
            " that committed late. If this copy is the one to continue with, and no relay works on the original any"
            " more, say --yes. After pg_upgrade say --same-history, which skips nothing."
        )
    async with outbox.link("rebase") as link:
        moved = await rebase_cursors(link, outbox.layout, same_history=same_history)
    _print(outbox, f"{counted(moved, 'cursor')} rebased" if moved else "all cursors are of this database already")


def _print(outbox: Outbox, message: str) -> None:
    click.echo(f"{full_name(outbox.relay)}: {safe(message)}")


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
        await overview.set_state(link, outbox.table, known.name, state, reason)
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
        if relays := await overview.relays_serving(link, outbox.table, known.name):
            raise ConfigError(
                f"{known.name} is served by {', '.join(relays)}, which would create it and deliver everything again."
                " Remove its manifest there first and wait for the next heartbeat of the relay, or stop the relay."
            )
        if not yes:
            raise ConfigError(f"this deletes the progress, parked events and dead letters of {known.name}: say --yes.")
        await overview.forget(link, outbox.table, known.name)
    click.echo(f"{known.name} is forgotten")
