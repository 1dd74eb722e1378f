"""Configuration change in a running session, one subscription at a time.

Unchanged subscriptions continue without a pause. A changed or deleted subscription first finishes its batches in
flight, which takes until its sink answers (at most ``Timings.drain_within``) and delays no other subscription. After
the withdrawal, a changed subscription is declared and admitted again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from mailboat.delivery.stream import Stream
from mailboat.runtime.session import RelaySession
from mailboat.runtime.subscription_set import StreamParts, SubscriptionSet
from mailboat.sinks.protocol import Sink
from mailboat.store.outbox_store import Subscription
from mailboat.store.postgres import PostgresStore
from mailboat.store.subscription_rows import ConfigVersion
from mailboat_spec import EventSubscription

log = logging.getLogger(__name__)

NewStream = Callable[[StreamParts, Subscription], Stream]


class ConfigChange:
    """The subscriptions that a session delivers and those being withdrawn."""

    def __init__(
        self, store: PostgresStore, session: RelaySession, subscription_set: SubscriptionSet, new_stream: NewStream
    ) -> None:
        self.withdrawn = asyncio.Event()
        """Set when a subscription was withdrawn. Its new configuration can then be applied."""
        self._store = store
        self._session = session
        self._new_stream = new_stream
        self._delivered_by = {stream.name: subscription_set.parts[stream.name] for stream in session.streams.values()}
        self._withdrawing: dict[str, asyncio.Task[None]] = {}
        self.replaced: list[Sink] = []
        """Sinks to close once no subscription being withdrawn uses them."""

    @property
    def withdrawing(self) -> frozenset[str]:
        """Subscriptions that are finishing their batches in flight."""
        return frozenset(self._withdrawing)

    @property
    def under_way(self) -> bool:
        """Whether a subscription is being withdrawn, or was withdrawn and is not declared again yet."""
        return bool(self._withdrawing) or self.withdrawn.is_set()

    def dismiss(
        self, subscription_set: SubscriptionSet, wait_for_others: Callable[[EventSubscription], Awaitable[None]]
    ) -> None:
        """Start to withdraw the subscriptions that can't continue unchanged.

        If a subscription stays but not its partitions, ``wait_for_others`` is awaited so that other relays can finish.
        """
        for number, stream in list(self._session.streams.items()):
            new, present = subscription_set.parts.get(stream.name), self._delivered_by[stream.name]
            if stream.name in self._withdrawing or (new is not None and new.continues(present)):
                continue
            partitions = self._session.subscriptions[number].partitions
            keep = new is not None and new.resource.spec.partitions == partitions and not new.pulled
            then = partial(wait_for_others, new.resource) if new is not None and not keep else None
            self._withdrawing[stream.name] = self._session.spawn(self._leave(number, stream.name, keep, then))

    async def _leave(self, number: int, name: str, keep: bool, then: Callable[[], Awaitable[None]] | None) -> None:
        await self._session.withdraw(number, keep=keep)
        if then is not None:
            await then()
        del self._withdrawing[name], self._delivered_by[name]
        self.withdrawn.set()

    async def declare(
        self, subscription_set: SubscriptionSet, config_version: ConfigVersion, *, may_lay_out: bool
    ) -> None:
        """Declare all subscriptions not being withdrawn; admit those that are new or withdrawn and still wanted."""
        present = [parts for name, parts in subscription_set.parts.items() if name not in self._withdrawing]
        declared = [parts.resource for parts in present]
        found = await self._store.declare(declared, may_lay_out=may_lay_out, config_version=config_version)
        for number, subscription in found.items():
            if number in self._session.streams:
                self._session.set_paused(number, subscription.paused)  # the status reports the new configuration now
            else:
                parts = subscription_set.parts[subscription.name]
                self._delivered_by[subscription.name] = parts
                self._session.admit(subscription, self._new_stream(parts, subscription))

    def stop(self) -> None:
        """Stop admitting subscriptions. The session completes the pending releases when it ends."""
        for leave in self._withdrawing.values():
            leave.cancel()

    async def close_unused(self) -> None:
        """Close the replaced sinks that no subscription uses any longer."""
        used = {id(parts.sink) for parts in self._delivered_by.values()}
        unused = [sink for sink in self.replaced if id(sink) not in used]
        self.replaced = [sink for sink in self.replaced if id(sink) in used]
        await close_all(unused)


async def close_all(sinks: Iterable[Sink]) -> None:
    """Close sinks. Log an error of a (third-party) sink and continue with the others."""
    for sink in sinks:
        try:
            await sink.close()
        except Exception:
            log.exception("Sink could not be closed")
