"""Life of a consumer with a source: builds the parts, runs the engine, reports the status.

States: *Connecting* → *Running* → *Stopping*; with ``state: Paused`` it reports and handles nothing.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

from mailboat.consumer.broker.engine import BrokerEngine, EngineState
from mailboat.consumer.broker.parts import build_dead_letters, build_memory, build_source, engine_settings
from mailboat.consumer.broker.protocol import PassingPoint, SourceState, ignore_point
from mailboat.consumer.dispatch import Dispatcher
from mailboat.consumer.status import run_with_status
from mailboat.errors import ConfigError
from mailboat.runtime.secrets import Secrets
from mailboat_spec import EventSubscription, State, full_name
from mailboat_spec.consumer_report import (
    ConsumedPartition,
    ConsumerReport,
    DeadLetterHealth,
    SourceHealth,
    StoreHealth,
)

log = logging.getLogger(__name__)


class BrokerRunner:
    """Runs the handlers of one subscription with a source."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        resource: EventSubscription,
        secrets: Secrets,
        *,
        instance: str,
        claims_instance: str | None = None,
        concurrency: int | None = None,
        listen: str | None = None,
        passing: PassingPoint = ignore_point,
    ) -> None:
        """``claims_instance``: name of this process that survives a restart and that no other process has. Then a
        restarted process takes over its claims at once; None: after the lease."""
        self._dispatcher = dispatcher
        self._resource = resource
        self._name = full_name(resource)
        self._instance = instance
        self._listen = listen
        self._stop = asyncio.Event()
        self._check_handlers()
        dispatcher.no_handler = resource.spec.delivery.no_handler
        settings = engine_settings(resource, concurrency)
        kind = dispatcher.transaction_kind()
        self._memory = build_memory(resource, secrets, kind, instance=claims_instance, size=settings.concurrency)
        self._engine: BrokerEngine | None = None
        if resource.spec.state is State.RUNNING:
            self._engine = BrokerEngine(
                dispatcher,
                build_source(resource, secrets, passing),
                self._memory.claims,
                self._memory.execution,
                build_dead_letters(resource, secrets),
                settings,
                passing=passing,
            )

    def _check_handlers(self) -> None:
        if any(each.is_batch for each in self._dispatcher.handlers):
            raise ConfigError(f"consumer {self._name}: @batch is for pull subscriptions: use @on with a source")

    async def serve(self, stop: asyncio.Event) -> None:
        """Handle events until ``stop`` is set, then drain."""
        self._stop = stop
        if self._resource.spec.idempotency is None:
            log.warning(
                "No idempotency: redelivered events are handled again, attempts are counted in memory",
                extra={"consumer": self._name},
            )
        log.info("Consuming.", extra={"consumer": self._name, "instance": self._instance})
        work = stop.wait() if self._engine is None else self._engine.run(stop)
        try:
            await run_with_status(self._listen, self.report, work, stop)
        finally:
            if self._memory.sessions is not None:
                await self._memory.sessions.close()

    def report(self) -> ConsumerReport:
        """Return the status from values in memory."""
        if self._engine is None:
            paused = "Stopping" if self._stop.is_set() else "Paused"
            return ConsumerReport(name=self._name, instance=self._instance, state=paused)
        state = self._engine.state()
        counts, engine = state.counts, state.engine
        source = self._source_health(state.source)
        ages = [each.oldest_age for each in source.partitions if each.oldest_age is not None]
        return ConsumerReport(
            name=self._name,
            instance=self._instance,
            state="Stopping" if self._stop.is_set() else "Running" if state.source.connected else "Connecting",
            message=state.stopped or state.source.trouble or state.claims_trouble or "",
            workers=state.running,
            lag=sum(each.lag or 0 for each in state.source.partitions.values()),
            oldest_age=max(ages, default=None),
            parked=state.parked + sum(each.behind for each in state.lanes),
            dead=engine.dead,
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
                topic=self._resource.dead_letter_topic or "",
                reachable=state.dead_letters_trouble is None,
                error=state.dead_letters_trouble,
                stopped=state.stopped is not None,
            ),
        )

    def _source_health(self, state: SourceState) -> SourceHealth:
        assert self._resource.spec.source is not None, "the resource has a source"
        now = datetime.now(UTC)
        return SourceHealth(
            kind=self._resource.spec.source.kind,
            reachable=state.trouble is None,
            error=state.trouble,
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
        store = self._resource.spec.idempotency
        if store is None:
            return None
        problem = next(iter(self._memory.problems), None)
        return StoreHealth(
            kind="redis" if store.redis is not None else "postgres",
            reachable=state.claims_trouble is None,
            error=state.claims_trouble,
            doubt=None if problem is None else problem.reason,
            doubt_message="" if problem is None else problem.message,
        )
