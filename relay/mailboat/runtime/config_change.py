"""Configuration change in a running session, one subscription at a time.

Unchanged subscriptions continue without a pause. A changed or deleted subscription first finishes its batches in
flight, which takes until its sink answers (at most ``Timings.drain_within``) and delays no other subscription. After
the withdrawal, a changed subscription is declared and admitted again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from mailboat.delivery.stream import Stream
from mailboat.errors import MailboatError
from mailboat.runtime.relay_config import RelayConfig
from mailboat.runtime.session import RelaySession
from mailboat.runtime.subscription_set import StreamParts
from mailboat.sinks.protocol import Sink
from mailboat.store.outbox_store import Subscription
from mailboat.store.postgres import PostgresStore
from mailboat.store.subscription_rows import ConfigVersion
from mailboat_spec import EventSubscription, full_name

log = logging.getLogger(__name__)

_OTHERS_TIMEOUT = 10.0
"""Seconds for which repartitioning waits until other relays, which get the same configuration, have finished."""
_POLL_EVERY = 0.05
_RETIRE_EVERY = 1.0

NewStream = Callable[[StreamParts, Subscription], Stream]


class ConfigChange:
    """The subscriptions that a session delivers and those being withdrawn."""

    def __init__(self, config: RelayConfig, store: PostgresStore, session: RelaySession, new_stream: NewStream) -> None:
        self.withdrawn = asyncio.Event()
        """Set when a subscription was withdrawn. Its new configuration can then be applied."""
        self.replaced: list[Sink] = []
        """Sinks to close once no subscription being withdrawn uses them."""
        self._config = config
        self._store = store
        self._session = session
        self._new_stream = new_stream
        parts = config.subscription_set.parts
        self._delivered_by = {stream.name: parts[stream.name] for stream in session.streams.values()}
        self._withdrawing: dict[str, asyncio.Task[None]] = {}

    async def apply(self) -> bool:
        """Take up the configuration and secrets of now. Return False if a withdrawal has to end before the rest."""
        self.withdrawn.clear()
        self.replaced += self._config.take_up()
        for number, stream in list(self._session.streams.items()):
            new, present = self._config.subscription_set.parts.get(stream.name), self._delivered_by[stream.name]
            if stream.name not in self._withdrawing and (new is None or not new.continues(present)):
                leave = self._withdraw(number, stream.name, new)
                self._withdrawing[stream.name] = self._session.spawn(leave)
        await self._declare()
        complete = not self._withdrawing and not self.withdrawn.is_set()
        self._config.undeclared = not complete
        used = {id(parts.sink) for parts in self._delivered_by.values()}
        unused = [sink for sink in self.replaced if id(sink) not in used]
        self.replaced = [sink for sink in self.replaced if id(sink) in used]
        await close_all(unused)
        return complete

    async def _withdraw(self, number: int, name: str, new: StreamParts | None) -> None:
        """Withdraw a subscription. If it stays but not its partitions, wait until other relays have finished."""
        partitions = self._session.subscriptions[number].partitions
        keep = new is not None and new.resource.spec.partitions == partitions and not new.pulled
        await self._session.withdraw(number, keep=keep)
        if new is not None and not keep:
            await wait_for_others(self._store, [new.resource], self._config.version)
        del self._withdrawing[name], self._delivered_by[name]
        self.withdrawn.set()

    async def _declare(self) -> None:
        """Declare all subscriptions not being withdrawn; admit those that are new or withdrawn and still wanted."""
        config, parts = self._config, self._config.subscription_set.parts
        declared = [each.resource for name, each in parts.items() if name not in self._withdrawing]
        found = await self._store.declare(declared, may_lay_out=config.undeclared, config_version=config.version)
        for number, subscription in found.items():
            if number in self._session.streams:
                self._session.set_paused(number, subscription.paused)  # the status reports the new configuration now
            else:
                present = self._delivered_by[subscription.name] = parts[subscription.name]
                self._session.admit(subscription, self._new_stream(present, subscription))

    def stop(self) -> None:
        """Stop admitting subscriptions. The session completes the pending releases when it ends."""
        for leave in self._withdrawing.values():
            leave.cancel()

    async def retire_removed(self) -> None:
        """Retire deleted subscriptions once no relay with an older configuration delivers them."""
        named = {full_name(each) for each in self._config.current.subscriptions} | self._withdrawing.keys()
        version = self._config.version
        try:
            while True:
                retirement = await self._store.retire_removed(named, version)
                for name in retirement.retired:
                    log.info("Subscription deleted; its progress is kept for 24 h", extra={"subscription": name})
                if not retirement.awaited:
                    return
                await asyncio.sleep(_RETIRE_EVERY)
        except MailboatError as error:  # the session on the same connection fails too and is restarted
            log.debug("Deleted subscriptions were not retired: %s", error)


async def wait_for_others(store: PostgresStore, declared: Sequence[EventSubscription], version: ConfigVersion) -> None:
    """Wait until other relays, which get the same configuration, released their partitions.

    Repartitioning earlier would redeliver their in-flight batches.
    """
    deadline = time.monotonic() + _OTHERS_TIMEOUT
    while time.monotonic() < deadline:
        if not await store.owned_by_others(declared, version):
            return
        await asyncio.sleep(_POLL_EVERY)


async def close_all(sinks: Iterable[Sink]) -> None:
    """Close sinks. Log an error of a (third-party) sink and continue with the others."""
    for sink in sinks:
        try:
            await sink.close()
        except Exception:
            log.exception("Sink could not be closed")
