"""Reconcile one relay: observe, compute the desired children, apply them, push to the relays, write the status.

Level-triggered: every reconcile runs the same steps on the current state, and a second run without changes writes
nothing. If a step fails, the queue retries the whole reconcile. Order matters in one place only: the configuration is
written to the ConfigMap before it is pushed, so that a restarted relay finds at least the version it had.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.children import ChildApplier, forbidden_blocker
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import CONFIG_MAP, POD, RELAY, SUBSCRIPTION, Key, Kind, Object
from mailboat_operator.kube.errors import Forbidden, KubeError, Throttled
from mailboat_operator.relays import observation
from mailboat_operator.relays.observation import Observation, ObservedSubscription, SubscriptionParser
from mailboat_operator.relays.reports import Answer, partitions_of
from mailboat_operator.relays.signing_keys import Signer
from mailboat_operator.relays.state import RelayStates
from mailboat_operator.resources import CHILD_KINDS, Owner, configmap, desired, owner_of
from mailboat_operator.resources.configmap import Configuration, next_configuration
from mailboat_operator.resources.pod import RelayImage
from mailboat_operator.status.conditions import Blocker, EventNote
from mailboat_operator.status.subscription import SubscriptionFacts, subscription_status
from mailboat_spec import OutboxRelay, Reason, Runtime

_SOON: Final = 1.0
"""Seconds until the next reconcile while a push or a partition move is in flight."""
_WITHOUT_PODS: Final = 60.0
"""Seconds until the next reconcile of a relay without pods, whose start may take too long."""
_STUCK: Final = 5
"""Consecutive failed reconciles before the status reports the failure: some ten seconds."""


@dataclass(frozen=True, slots=True)
class Result:
    blocker: Blocker | None = None
    blocked: Collection[Kind] = ()
    version: int = 0
    """Version of the configuration that relays should run."""
    settled: bool = True


@dataclass(slots=True)
class Reconciler:
    cache: ResourceCache
    children: ChildApplier
    relays: RelayStates
    status_writer: StatusWriter
    signer: Signer
    image: RelayImage
    interval: float
    _failures: dict[Key, int] = field(default_factory=dict, init=False)
    _parsers: dict[Key, SubscriptionParser] = field(default_factory=dict, init=False)

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one relay. Return the seconds until the next run; None: wait for an event."""
        self.status_writer.forget_deleted(key)
        found = self.cache.relay(key)
        if found is None:
            self.children.forget(key)
            self._failures.pop(key, None)
            self._parsers.pop(key, None)
            return await self._reconcile_missing(key)
        if found["metadata"].get("deletionTimestamp"):
            return None  # garbage collection removes the children; nothing may delay the deletion
        observed = await self._observe(key, found)
        if not self._still_exists(key, found):
            return None  # `found` is outdated: status calls take time. The deletion event triggers a reconcile
        try:
            result = await self._apply(observed)
        except KubeError as error:
            await self.status_writer.write(observed, self._stuck_blocker(key, error), version=0)
            raise
        self._failures.pop(key, None)
        await self.status_writer.write(observed, result.blocker, result.version)
        return self._next_run(observed, result)

    # ---- observe ---------------------------------------------------------------------------------------------------

    async def _observe(self, key: Key, found: Object) -> Observation:
        relay, problem = observation.parse_resource(found, OutboxRelay)
        live = await self.children.find(CONFIG_MAP, key)
        own = live is not None and owner_of(live, key[1], found["metadata"]["uid"]) is Owner.OWN
        written = await asyncio.to_thread(configmap.configuration_in, live) if own else None
        pods = self.cache.pods_of(key)
        polled = [pod for pod in pods if pod.has_relay and not pod.finished]
        answers = await self.relays.poll(key, polled, partitions_of(self.cache.subscriptions_of(key)))
        resources = self.cache.subscriptions_of(key)
        parser = self._parsers.setdefault(key, SubscriptionParser())

        def subscriptions() -> list[ObservedSubscription]:
            return [self._observed(key, each, written, answers) for each in parser.read(resources)]

        observed = await asyncio.to_thread(subscriptions)  # parsing many subscriptions takes seconds
        return Observation(key, found, relay, problem, written, observed, pods, answers)

    def _observed(
        self, key: Key, parsed: ObservedSubscription, written: Configuration | None, answers: Sequence[Answer]
    ) -> ObservedSubscription:
        """Return the form that relays should run. If the spec is invalid, relays keep the last valid form."""
        if parsed.subscription is not None:
            return parsed
        pushed = self.relays.pushed_config(key)
        form, lost = observation.find_last_valid_form(parsed.found, "/".join(key), written, pushed, answers)
        if form is None:
            return replace(parsed, lost=lost)
        return replace(parsed, subscription=observation.parse_subscription(form).subscription, last_valid=form)

    def _still_exists(self, key: Key, found: Object) -> bool:
        """Return whether the relay resource still exists after the status calls, which take time.

        If it was deleted meanwhile with ``--cascade=orphan``, its children stay on purpose. With a deleted owner in
        their references again, garbage collection would remove them.
        """
        now = (self.cache.relay(key) or {}).get("metadata") or {}
        return now.get("uid") == found["metadata"]["uid"] and not now.get("deletionTimestamp")

    # ---- desired, apply, push --------------------------------------------------------------------------------------

    async def _apply(self, observed: Observation) -> Result:
        """Apply the children, then push configuration and assignment."""
        relay = observed.relay
        if relay is None:
            return Result()
        if observed.hold_reason:
            return Result(Blocker(Reason.CONFIGURATION_HELD, observed.hold_reason))
        configuration, excess = await asyncio.to_thread(_next_configuration, observed, relay)
        if excess:
            return Result(Blocker(Reason.CONFIGURATION_HELD, excess))
        children = desired(relay, observed.secrets, configuration, self.signer.ring.public_pem(), self.image)
        applied = await self.children.apply(relay, children)
        await self.status_writer.write_events(RELAY, observed.found, applied.events)
        if not applied.blocked and (relay.spec.runtime is Runtime.DEPLOYMENT or observed.sidecar_works):
            await self.children.remove(relay, [kind for kind in CHILD_KINDS if kind not in children])
        # Push only a configuration that a restarted relay finds in the ConfigMap.
        settled = CONFIG_MAP in applied.blocked or await self._push(observed, configuration)
        if applied.failed is not None:
            raise applied.failed
        return Result(applied.blocker, applied.blocked, configuration.version, settled)

    async def _push(self, observed: Observation, configuration: Configuration) -> bool:
        """Push configuration and assignment. Return True if no push and no partition move is in flight."""
        pushed = await self.relays.push_config(observed.key, observed.answers, configuration)
        moving = await self.relays.push_assignment(observed.key, observed.work, observed.answers, configuration)
        return not (pushed.in_flight or moving)

    # ---- failures and the next run ---------------------------------------------------------------------------------

    def _stuck_blocker(self, key: Key, error: KubeError) -> Blocker:
        """Hide short failures: raise until ``_STUCK`` attempts failed in a row, then return a blocker for the status.

        A throttled request always raises, since the API server asked for fewer requests.
        """
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] < _STUCK or isinstance(error, Throttled):
            raise error
        if isinstance(error, Forbidden):
            return forbidden_blocker(str(error))
        return Blocker(Reason.PROGRESSING, f"The operator can't finish its work, and tries again: {error}.")

    def _next_run(self, observed: Observation, result: Result) -> float:
        if CONFIG_MAP in result.blocked or (result.blocked and not observed.answers):
            return self.children.retry_interval
        if not observed.answers:
            return _WITHOUT_PODS
        return self.interval if result.settled else min(self.interval, _SOON)

    # ---- a name without a relay ------------------------------------------------------------------------------------

    async def _reconcile_missing(self, key: Key) -> float | None:
        """Report a missing relay on the subscriptions and pods that refer to it, and pause its sidecars.

        Kubernetes removes the children of a deleted relay. Application pods with its sidecars stay, and only the
        operator can notify them.
        """
        remedy = "create it, then restart this pod to get its relay."
        problem = f'There is no OutboxRelay "{key[1]}" in this namespace: {remedy}'
        no_such_relay = EventNote(True, Reason.RELAY_NOT_FOUND, problem)
        for pod in self.cache.pods_of(key):
            if pod.lacks_sidecar:
                regarding = {"metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid}}
                await self.status_writer.write_events(POD, regarding, [no_such_relay])
        now = datetime.now(UTC)
        for found in self.cache.subscriptions_of(key):
            facts = SubscriptionFacts(
                name=f"{key[0]}/{found['metadata']['name']}",
                generation=found["metadata"].get("generation", 0),
                before=found.get("status") or {},
                subscription=observation.parse_subscription(found).subscription,
                relay="/".join(key),
                relay_exists=False,
            )
            await self.status_writer.write_status(SUBSCRIPTION, found, subscription_status(facts, now))
        return await self._pause_sidecars(key)

    async def _pause_sidecars(self, key: Key) -> float | None:
        pods = [pod for pod in self.cache.pods_of(key) if pod.alive and not pod.own]
        live = self.cache.child(CONFIG_MAP, key)
        # A ConfigMap without an owner was orphaned on purpose, so that relays keep running with it.
        orphaned = live is not None and owner_of(live, key[1], "") is not Owner.PREDECESSOR
        before = self.relays.pushed_config(key) or await asyncio.to_thread(configmap.configuration_in, live)
        if pods and before is not None and not orphaned:
            paused = await asyncio.to_thread(configmap.all_paused, before, _now_ms())
            answers = await self.relays.poll(key, pods, {})
            pushed = await self.relays.push_config(key, answers, paused)
            behind = pushed.behind or any(answer.report is None for answer in answers)
            return self.interval if behind else None  # the pushed configuration is kept while these pods exist
        self.relays.forget(key)
        return None


def _next_configuration(observed: Observation, relay: OutboxRelay) -> tuple[Configuration, str]:
    """Return the desired configuration, and why it can't be stored (empty if it can). Takes a while if large."""
    made = next_configuration(relay, observed.items, observed.configuration, _now_ms(), observed.version_in_use)
    return made, configmap.too_large(made, relay.metadata.name)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
