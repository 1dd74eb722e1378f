"""Life of a consumer with a source: builds the parts, runs the engine, reports the status.

States: *Connecting* → *Running* → *Stopping*; with ``state: Paused`` it reports and handles nothing. A change of the
manifest is followed within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mailboat.consumer.broker.engine import BrokerEngine, EngineState
from mailboat.consumer.broker.interfaces import PassingPoint, SourceState, ignore_point
from mailboat.consumer.broker.parts import (
    Memory,
    build_dead_letters,
    build_memory,
    build_source,
    build_waiting_letters,
    engine_settings,
)
from mailboat.consumer.consumer_settings import BrokerSettings
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.status_server import run_with_status
from mailboat.errors import ConfigError
from mailboat.runtime.file_watch import watch
from mailboat_spec import EventSubscription, State, full_name
from mailboat_spec.consumer_report import (
    ConsumedPartition,
    ConsumerReport,
    DeadLetterHealth,
    SourceHealth,
    StoreHealth,
)

if TYPE_CHECKING:
    from mailboat.consumer.broker.dead_count import WaitingLetters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is built from one version of the subscription."""

    resource: EventSubscription
    memory: Memory
    engine: BrokerEngine | None
    """None with ``state: Paused``."""
    waiting: WaitingLetters | None = None
    """Count of dead letters on the topic."""


class BrokerRunner:
    """Runs the handlers of one subscription with a source. Follows its manifest: a changed one is taken over by a drain
    of the old engine and the start of a new one, and an invalid one is refused as a whole."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: BrokerSettings,
        *,
        instance: str,
        reread: Callable[[], object] | None = None,
        claims_instance: str | None = None,
        concurrency: int | None = None,
        listen: str | None = None,
        passing: PassingPoint = ignore_point,
    ) -> None:
        """``reread`` returns the settings of the present manifest. ``claims_instance``: name of this process that
        survives a restart and that no other process has. Then a restarted process takes over its claims at once; None:
        after the lease."""
        self._dispatcher = dispatcher
        self._manifests = settings.manifests
        self._reread = reread
        self._name = full_name(settings.resource)
        self._instance = instance
        self._claims_instance = claims_instance
        self._concurrency = concurrency
        self._listen = listen
        self._passing = passing
        self._stop = asyncio.Event()
        self._check_handlers()
        self._parts = self._build(settings)
        self._next: _Parts | None = None
        self._changed = asyncio.Event()

    def _check_handlers(self) -> None:
        if any(each.is_batch for each in self._dispatcher.handlers):
            raise ConfigError(f"consumer {self._name}: @batch is for pull subscriptions: use @on with a source")

    def _build(self, settings: BrokerSettings) -> _Parts:
        """Build the parts without connecting. Raises ``ConfigError``."""
        resource, secrets = settings.resource, settings.secrets
        chosen = engine_settings(resource, self._concurrency)
        kind = self._dispatcher.transaction_kind()
        memory = build_memory(resource, secrets, kind, instance=self._claims_instance, size=chosen.concurrency)
        if resource.spec.state is not State.RUNNING:
            return _Parts(resource, memory, None)
        engine = BrokerEngine(
            self._dispatcher,
            build_source(resource, secrets, self._passing),
            memory.claims,
            memory.execution,
            build_dead_letters(resource, secrets),
            chosen,
            passing=self._passing,
        )
        return _Parts(resource, memory, engine, build_waiting_letters(resource, secrets))

    async def serve(self, stop: asyncio.Event) -> None:
        """Handle events until ``stop`` is set, then drain."""
        self._stop = stop
        log.info("Consuming.", extra={"consumer": self._name, "instance": self._instance})
        await run_with_status(self._listen, self.report, self._run(stop), stop)

    async def _run(self, stop: asyncio.Event) -> None:
        """Run one engine after the other: each version of the manifest has its own."""
        following = asyncio.create_task(self._follow()) if self._manifests and self._reread is not None else None
        try:
            while not stop.is_set():
                await self._run_until_changed(stop)
                if self._next is not None:
                    self._parts, self._next = self._next, None
                    self._changed.clear()
                    log.info(
                        "Manifest changed", extra={"consumer": self._name, "state": self._parts.resource.spec.state}
                    )
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _run_until_changed(self, stop: asyncio.Event) -> None:
        parts = self._parts
        self._dispatcher.no_handler = parts.resource.spec.delivery.no_handler
        if parts.resource.spec.idempotency is None:
            log.warning(
                "No idempotency: redelivered events are handled again, attempts are counted in memory",
                extra={"consumer": self._name},
            )
        ended = asyncio.Event()
        signals = [asyncio.create_task(each.wait()) for each in (stop, self._changed)]
        for signal in signals:
            signal.add_done_callback(lambda _: ended.set())
        try:
            await (ended.wait() if parts.engine is None else self._run_engine(parts.engine, parts.waiting, ended))
        finally:
            for signal in signals:
                signal.cancel()
            await asyncio.gather(*signals, return_exceptions=True)
            if parts.memory.sessions is not None:
                await parts.memory.sessions.close()

    @staticmethod
    async def _run_engine(engine: BrokerEngine, waiting: WaitingLetters | None, stop: asyncio.Event) -> None:
        counting = None if waiting is None else asyncio.create_task(waiting.run(engine))
        try:
            await engine.run(stop)
        finally:
            if counting is not None:
                counting.cancel()
                await asyncio.gather(counting, return_exceptions=True)

    async def _follow(self) -> None:
        await watch(self._manifests, self._read_again)  # the first look finds changes since the start

    async def _read_again(self) -> None:
        """Take over the present manifest, unless it is invalid or changes nothing."""
        assert self._reread is not None, "the caller has looked"
        try:
            settings = await asyncio.to_thread(self._reread)
            if not isinstance(settings, BrokerSettings):
                raise ConfigError(f"EventSubscription {self._name} has no source any more: restart the consumer")
            current = self._parts if self._next is None else self._next
            if settings.resource.spec == current.resource.spec:
                return
            self._next = await asyncio.to_thread(self._build, settings)
        except ConfigError as error:
            log.error("Manifest refused, the last valid one stays in use: %s", error, extra={"consumer": self._name})
            return
        self._changed.set()

    def report(self) -> ConsumerReport:
        """Return the status from values in memory."""
        resource, running = self._parts.resource, self._parts.engine
        if running is None:
            paused = "Stopping" if self._stop.is_set() else "Paused"
            return ConsumerReport(name=self._name, instance=self._instance, state=paused)
        state = running.state()
        counts, engine = state.counts, state.engine
        waiting = None if self._parts.waiting is None else self._parts.waiting.count
        source = self._source_health(state.source)
        ages = [each.oldest_age for each in source.partitions if each.oldest_age is not None]
        return ConsumerReport(
            name=self._name,
            instance=self._instance,
            state="Stopping" if self._stop.is_set() else "Running" if state.source.connected else "Connecting",
            message=state.stopped or state.source.error or state.claims_error or "",
            workers=state.running,
            lag=sum(each.lag or 0 for each in state.source.partitions.values()),
            oldest_age=max(ages, default=None),
            parked=state.parked + sum(each.behind for each in state.lanes),
            dead=engine.dead if waiting is None else waiting,
            handled=counts.handled,
            ignored=counts.ignored,
            refused=counts.refused,
            redelivered=counts.redelivered,
            duplicates=engine.duplicates,
            takeovers=engine.takeovers,
            overlaps=engine.overlaps,
            unclaimed=engine.unclaimed,
            last_error=counts.last_error,
            source=source,
            idempotency=self._store_health(state),
            dead_letters=DeadLetterHealth(
                topic=resource.dead_letter_topic or "",
                reachable=state.dead_letters_error is None,
                error=state.dead_letters_error,
                stopped=state.stopped is not None,
                waiting=waiting,
            ),
        )

    def _source_health(self, state: SourceState) -> SourceHealth:
        chosen = self._parts.resource.spec.source
        assert chosen is not None, "the resource has a source"
        now = datetime.now(UTC)
        return SourceHealth(
            kind=chosen.kind,
            reachable=state.error is None,
            error=state.error,
            owned=len(state.partitions),
            partitions=tuple(
                ConsumedPartition(
                    partition=number,
                    lag=each.lag,
                    oldest_age=None if each.oldest is None else max(0.0, (now - each.oldest).total_seconds()),
                    paused=each.paused,
                )
                for number, each in state.partitions.items()
            ),
        )

    def _store_health(self, state: EngineState) -> StoreHealth | None:
        store = self._parts.resource.spec.idempotency
        if store is None:
            return None
        problem = next(iter(self._parts.memory.problems), None)
        return StoreHealth(
            kind="redis" if store.redis is not None else "postgres",
            reachable=state.claims_error is None,
            error=state.claims_error,
            doubt=None if problem is None else problem.reason,
            doubt_message="" if problem is None else problem.message,
        )
