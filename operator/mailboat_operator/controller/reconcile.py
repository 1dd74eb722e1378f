"""Reconcile one relay: compare desired and actual state and apply the difference.

Level-triggered: every reconcile runs the same steps on the current state, whatever triggered it. A second run without
changes writes nothing. If a step fails, the queue retries the whole reconcile. Order matters in one place only: the
configuration is written to the ConfigMap before it is pushed, so that a restarted relay finds at least the version it
had.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.children import ApplyResult, ChildApplier
from mailboat_operator.controller.parse import (
    ParsedSubscription,
    SubscriptionParser,
    find_last_valid_form,
    parse_relay,
    parse_subscription_alone,
)
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import (
    CONFIG_MAP,
    DEPLOYMENT,
    POD,
    RELAY,
    SUBSCRIPTION,
    Forbidden,
    Key,
    KubeError,
    Object,
    Throttled,
)
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays.assignment import Work
from mailboat_operator.relays.http_client import Signer
from mailboat_operator.relays.pods import RelayPod
from mailboat_operator.relays.reports import Answer, partitions_of
from mailboat_operator.relays.state import RelayStates
from mailboat_operator.relays.totals import RestartTotals
from mailboat_operator.resources import CHILD_KINDS, desired
from mailboat_operator.resources.configmap import (
    Configuration,
    Item,
    all_paused,
    configuration_in,
    item_as_known,
    next_configuration,
    too_large,
)
from mailboat_operator.resources.deployment import replica_failure, rollout_failure, selector_labels
from mailboat_operator.resources.ownership import Owner, owner_of
from mailboat_operator.resources.pod import (
    RelayImage,
    child_name,
    database_secrets,
    secrets_in,
    secrets_of,
    sink_secrets,
)
from mailboat_operator.status.conditions import EventNote, overdue
from mailboat_operator.status.relay import RelayFacts, database_changed, relay_status
from mailboat_operator.status.subscription import SubscriptionFacts, subscription_status
from mailboat_spec import EventSubscription, OutboxRelay, Reason, Runtime
from mailboat_spec.names import RELAY_LABEL

_SOON: Final = 1.0
"""Seconds until the next reconcile while a push or a partition move is in flight."""
_WITHOUT_PODS: Final = 60.0
"""Seconds until the next reconcile of a relay without pods, whose start may take too long."""
_AT_A_STRETCH: Final = 20
"""Statuses built before other tasks get a turn: some milliseconds."""
_STUCK: Final = 5
"""Consecutive failed reconciles before the status reports the failure: some ten seconds."""


@dataclass(frozen=True, slots=True)
class _Told:
    """One subscription: its resource, and the form that relays are configured with."""

    read: ParsedSubscription
    subscription: EventSubscription | None
    """The spec, or its last valid form. None if that form can't be parsed, or if relays have none."""
    kept: Object | None = None
    """The last valid form, as relays have it, if the spec is invalid."""
    lost: bool = False
    """Relays have the subscription, but its last valid form can't be recovered."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Input of one reconcile: resource, subscriptions, pods and relay reports."""

    key: Key
    found: Object
    relay: OutboxRelay | None
    problem: str
    told: Sequence[_Told]
    pods: Sequence[RelayPod]
    asked: Sequence[RelayPod]
    """Pods that contain a relay and have not finished."""
    answers: Sequence[Answer]

    @property
    def subscriptions(self) -> list[EventSubscription]:
        return [each.subscription for each in self.told if each.subscription is not None]

    @property
    def items(self) -> list[Item]:
        """One configuration item per subscription."""
        kept = [item_as_known(each.kept) for each in self.told if each.kept is not None]
        return [*kept, *(each.read.item for each in self.told if each.kept is None and each.read.item is not None)]

    @property
    def lost(self) -> list[str]:
        return [each.read.found["metadata"]["name"] for each in self.told if each.lost]

    def secrets(self, relay: OutboxRelay) -> tuple[str, ...]:
        """Names of all Secrets that relays must mount, including those of subscriptions that only relays can parse."""
        unread = [each.kept for each in self.told if each.kept is not None and each.subscription is None]
        return tuple(
            sorted({*secrets_of(relay, self.subscriptions), *(name for it in unread for name in secrets_in(it))})
        )


@dataclass(frozen=True, slots=True)
class _Done:
    """Result of one reconcile."""

    kept: ApplyResult = field(default_factory=ApplyResult)
    held: str = ""
    """Why relays get no new configuration; empty if they do."""
    stuck: str = ""
    """Why reconciles keep failing; empty if they do not."""
    version: int = 0
    """Version of the configuration that relays should run."""
    settled: bool = True
    """True if no push and no partition move is in flight."""


class Reconciler:
    """Reconcile loop body for all relays."""

    def __init__(
        self,
        cache: ResourceCache,
        keeper: ChildApplier,
        relays: RelayStates,
        status_writer: StatusWriter,
        metrics: Metrics,
        signing: Signer,
        image: RelayImage,
        interval: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._children = keeper
        self._relays = relays
        self._status_writer = status_writer
        self._metrics = metrics
        self._signing = signing
        self._image = image
        self._interval = interval
        self._wall_clock = wall_clock
        self._tally = RestartTotals()
        self._stuck: dict[Key, int] = {}
        self._readers: dict[Key, SubscriptionParser] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one relay. Return the seconds until the next run; None: wait for an event."""
        self._forget_departed(key)
        found = self._cache.relay(key)
        if found is None:
            return await self._without_relay(key)
        if found["metadata"].get("deletionTimestamp"):
            return None  # garbage collection removes the children; nothing may delay the deletion
        look, before = await self._look(key, found)
        if not self._is_still_there(key, found):
            return None  # `found` is outdated: status calls take time. The deletion event triggers a reconcile
        done, stuck = _Done(), None
        if look.relay is not None:
            try:
                done = await self._bring_about(look, look.relay, before)
            except KubeError as error:
                stuck = error
        done = self._patiently(key, done, stuck)
        await self._report(look, done)
        if stuck is not None:
            raise stuck
        if CONFIG_MAP in done.kept.obstructed or (done.kept.obstructed and not look.asked):
            return self._children.patience
        if not look.asked:
            return _WITHOUT_PODS
        return self._interval if done.settled else min(self._interval, _SOON)

    def _patiently(self, key: Key, done: _Done, stuck: KubeError | None) -> _Done:
        """Hide short failures: raise until ``_STUCK`` attempts failed in a row, then return a result for the status.

        A throttled request always raises, since the API server asked for fewer requests.
        """
        if stuck is None:
            self._stuck.pop(key, None)
            return done
        self._stuck[key] = self._stuck.get(key, 0) + 1
        if self._stuck[key] < _STUCK or isinstance(stuck, Throttled):
            raise stuck
        return _Done(ApplyResult(forbidden=[str(stuck)])) if isinstance(stuck, Forbidden) else _Done(stuck=str(stuck))

    def _is_still_there(self, key: Key, found: Object) -> bool:
        """Return whether the relay resource still exists after the status calls, which take time.

        If the relay was deleted meanwhile with ``--cascade=orphan``, its children stay on purpose. If this reconcile
        made it their owner again, garbage collection would remove them.
        """
        now = self._cache.relay(key)
        if now is None or now["metadata"].get("deletionTimestamp"):
            return False
        return bool(now["metadata"]["uid"] == found["metadata"]["uid"])

    async def _look(self, key: Key, found: Object) -> tuple[_Look, Configuration | None]:
        read = parse_relay(found)
        before = await asyncio.to_thread(configuration_in, await self._own_config_map(key, found))
        pods = self._cache.pods_of(key)
        asked = [pod for pod in pods if pod.has_relay and not pod.finished]
        answers = await self._relays.poll(key, asked, partitions_of(self._cache.subscriptions_of(key)))
        subscriptions = self._cache.subscriptions_of(key)
        reader = self._readers.setdefault(key, SubscriptionParser())

        def as_told() -> list[_Told]:
            return [self._as_told(key, each, before, answers) for each in reader.read(found, subscriptions)]

        told = await asyncio.to_thread(as_told)
        return _Look(key, found, read.relay, read.problem, told, pods, asked, answers), before

    async def _own_config_map(self, key: Key, found: Object) -> Object | None:
        live = await self._children.find(CONFIG_MAP, key)
        ours = live is not None and owner_of(live, key[1], found["metadata"]["uid"]) is Owner.OURS
        return live if ours else None

    def _as_told(
        self, key: Key, read: ParsedSubscription, before: Configuration | None, answers: Sequence[Answer]
    ) -> _Told:
        """Return the form that relays should run. If the spec is invalid, relays keep the last valid form."""
        if read.subscription is not None:
            return _Told(read, read.subscription)
        known = find_last_valid_form(read.found, "/".join(key), before, self._relays.pushed_config(key), answers)
        form = known.form
        return _Told(read, parse_subscription_alone(form) if form is not None else None, form, known.lost)

    async def _bring_about(self, look: _Look, relay: OutboxRelay, before: Configuration | None) -> _Done:
        """Apply the children, then push configuration and assignment."""
        if look.lost:
            return _Done(held=_held(look.lost, look.key[1]))
        in_use = max(((each.report.config.version or 0) for each in look.answers if each.report is not None), default=0)
        now_ms = int(self._wall_clock() * 1000)

        def made() -> tuple[Configuration, str]:
            configuration = next_configuration(relay, look.items, before, now_ms, in_use)
            return configuration, too_large(configuration, look.key[1])

        configuration, excess = await asyncio.to_thread(made)
        if excess:
            return _Done(held=excess)
        keys = self._signing.public_keys()
        wanted = desired(relay, look.secrets(relay), configuration, keys, self._image)
        kept = await self._children.apply(relay, wanted)
        await self._status_writer.write_events(RELAY, look.found, kept.events)
        if not kept.obstructed and (relay.spec.runtime is Runtime.DEPLOYMENT or _sidecar_works(look)):
            await self._children.remove(relay, [kind for kind in CHILD_KINDS if kind not in wanted])
        # Push only a configuration that a restarted relay finds in the ConfigMap.
        settled = CONFIG_MAP in kept.obstructed or await self._tell_relays(look, relay, configuration)
        if kept.failed is not None:
            raise kept.failed
        return _Done(kept, version=configuration.version, settled=settled)

    async def _tell_relays(self, look: _Look, relay: OutboxRelay, configuration: Configuration) -> bool:
        """Push configuration and assignment. Return True if no push and no partition move is in flight."""
        handed = await self._relays.push_config(look.key, look.asked, look.answers, configuration)
        # Partitions of pull subscriptions belong to consumers: there is nothing to assign.
        work = [_work(relay, each) for each in look.subscriptions if each.spec.sink.pull is None]
        moving = await self._relays.push_assignment(look.key, work, look.asked, look.answers, configuration)
        return not (handed.on_its_way or moving)

    async def _report(self, look: _Look, done: _Done) -> None:
        name = "/".join(look.key)
        now = self._now()
        delayed: KubeError | None = None
        behind = bool(done.held or done.stuck) or _any_behind(look, done.version)
        for number, each in enumerate(look.told):
            if number % _AT_A_STRETCH == 0:
                await asyncio.sleep(0)
            try:
                await self._report_subscription(look, each, now, behind=behind)
            except Throttled:
                raise
            except KubeError as error:  # concerns this subscription only; still report the others and the relay
                delayed = error
        every = look.secrets(look.relay) if look.relay is not None else ()
        facts = RelayFacts(
            name=name,
            generation=look.found["metadata"].get("generation", 0),
            before=look.found.get("status") or {},
            relay=look.relay,
            problem=look.problem,
            taken=_taken(done.kept.taken, look.key[1]) if done.kept.taken else "",
            refused="; ".join(done.kept.refused),
            forbidden="; ".join(done.kept.forbidden),
            held=done.held,
            uncreated=replica_failure(self._cache.child(DEPLOYMENT, look.key)),
            halted=rollout_failure(self._cache.child(DEPLOYMENT, look.key)),
            stuck=done.stuck,
            pods=look.pods,
            answers=_of_the_living(look),
            subscriptions=len(look.told),
            lacking=[pod for pod in look.pods if pod.alive and not all(pod.sees(secret) for secret in every)],
            selector=_selector(look),
        )
        self._metrics.without_sidecar.labels(*look.key).set(sum(pod.lacks_sidecar for pod in look.pods))
        status = relay_status(facts, now)
        await self._status_writer.write_status(RELAY, look.found, status)
        await self._status_writer.write_events(RELAY, look.found, overdue(status["conditions"], now))
        await self._status_writer.write_events(RELAY, look.found, database_changed(facts.before, status))
        if delayed is not None:
            raise delayed

    async def _report_subscription(self, look: _Look, told: _Told, now: datetime, *, behind: bool) -> None:
        """``behind``: relays still run an earlier generation. Write the status with that observedGeneration, if any."""
        found = told.read.found
        metadata = found["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        before = found.get("status") or {}
        generation = metadata.get("generation", 0)
        if behind and told.read.subscription is not None:
            generation = before.get("observedGeneration", generation)
        needed = sink_secrets(told.subscription) if told.subscription is not None else ()
        facts = SubscriptionFacts(
            name=name,
            generation=generation,
            before=before,
            subscription=told.subscription,
            relay="/".join(look.key),
            relay_exists=True,
            problem=told.read.problem,
            answers=_of_the_living(look),
            lacking=[pod for pod in look.pods if pod.alive and not all(pod.sees(each) for each in needed)],
            published=self._tally.count(
                metadata["uid"],
                before.get("published", 0),
                _published(look, name),
                {pod.uid: pod.created for pod in look.asked},
            ),
        )
        status = subscription_status(facts, now)
        self._metrics.lag.labels(metadata["namespace"], metadata["name"]).set(status.get("lag", math.nan))
        await self._status_writer.write_status(SUBSCRIPTION, found, status)

    def _forget_departed(self, key: Key) -> None:
        for gone in self._cache.departed(key):
            metadata = gone["metadata"]
            self._tally.forget(metadata["uid"])
            self._status_writer.forget(metadata["uid"])
            of_subscription = gone["kind"] == SUBSCRIPTION.name
            forget = self._metrics.forget_subscription if of_subscription else self._metrics.forget_relay
            forget(metadata["namespace"], metadata["name"])

    async def _without_relay(self, key: Key) -> float | None:
        """Report the missing relay on its subscriptions and pause its sidecars. Kubernetes removes its children."""
        self._children.forget(key)
        self._stuck.pop(key, None)
        self._readers.pop(key, None)
        for pod in self._cache.pods_of(key):
            if pod.lacks_sidecar:
                await self._status_writer.write_events(POD, pod.reference, [_no_such_relay(key)])
        now = self._now()
        for found in self._cache.subscriptions_of(key):
            before = found.get("status") or {}
            facts = SubscriptionFacts(
                name=f"{key[0]}/{found['metadata']['name']}",
                generation=found["metadata"].get("generation", 0),
                before=before,
                subscription=parse_subscription_alone(found),
                relay="/".join(key),
                relay_exists=False,
                problem="",
                answers=(),
                lacking=(),
                published=before.get("published", 0),
            )
            await self._status_writer.write_status(SUBSCRIPTION, found, subscription_status(facts, now))
        return await self._pause_sidecars(key)

    async def _pause_sidecars(self, key: Key) -> float | None:
        """Pause the sidecars of a deleted relay: their application pods stay, and only the operator can notify them."""
        pods = [pod for pod in self._cache.pods_of(key) if pod.alive and not pod.own]
        live = self._cache.child(CONFIG_MAP, key)
        # A ConfigMap without an owner was orphaned on purpose, so that relays keep running with it.
        left = live is not None and owner_of(live, key[1], "") is not Owner.PREDECESSOR
        before = self._relays.pushed_config(key) or await asyncio.to_thread(configuration_in, live)
        if pods and before is not None and not left:
            paused = await asyncio.to_thread(all_paused, before, int(self._wall_clock() * 1000))
            answers = await self._relays.poll(key, pods, {})
            handed = await self._relays.push_config(key, pods, answers, paused)
            behind = handed.behind or any(answer.report is None for answer in answers)
            return self._interval if behind else None  # the pushed configuration is kept while these pods exist
        self._relays.forget(key)
        return None

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall_clock(), UTC)


def _work(relay: OutboxRelay, subscription: EventSubscription) -> Work:
    metadata, needed = subscription.metadata, (*database_secrets(relay), *sink_secrets(subscription))
    return Work(f"{metadata.namespace}/{metadata.name}", subscription.spec.partitions, frozenset(needed))


def _published(look: _Look, subscription: str) -> dict[str, int]:
    """Published counts as relays report them, by pod uid."""
    published = {}
    for pod, answer in zip(look.asked, look.answers, strict=True):
        report = answer.report.relay("/".join(look.key)) if answer.report is not None else None
        found = report.subscription(subscription) if report is not None else None
        if found is not None:
            published[pod.uid] = found.published
    return published


def _any_behind(look: _Look, version: int) -> bool:
    """Return whether a relay that answered still runs an earlier version of the configuration."""
    reports = (answer.report for answer in _of_the_living(look))
    return any(report is not None and (report.config.version or 0) < version for report in reports)


def _of_the_living(look: _Look) -> list[Answer]:
    """Answers of pods that keep running. A stopping relay hands over its partitions, so its report is outdated."""
    return [answer for pod, answer in zip(look.asked, look.answers, strict=True) if pod.alive]


def _sidecar_works(look: _Look) -> bool:
    """Return whether the Deployment can be deleted after a change of the runtime to Sidecar.

    Application pods get their sidecar only when they are restarted. Until a sidecar works, deleting the Deployment
    would stop delivery.
    """
    return any(
        not pod.own
        and pod.alive
        and answer.report is not None
        and (report := answer.report.relay("/".join(look.key))) is not None
        and report.database_reachable
        for pod, answer in zip(look.asked, look.answers, strict=True)
    )


def _taken(kinds: Sequence[str], relay: str) -> str:
    listed = " and ".join(kinds)
    return (
        f'{listed} "{child_name(relay)}" exists and is not Mailboat\'s, so it is left alone: rename this OutboxRelay, '
        "or remove that object."
    )


def _held(lost: Sequence[str], relay: str) -> str:
    return (
        f"Relays get no new configuration: the spec of EventSubscription {', '.join(lost)} is invalid, and the "
        f'ConfigMap "{child_name(relay)}" does not have its last valid form any more. Without it relays would '
        "forget how far it has come. Mend that spec, or delete the EventSubscription."
    )


def _no_such_relay(key: Key) -> EventNote:
    message = (
        f'There is no OutboxRelay "{key[1]}" in this namespace: create it, then restart this pod to get its relay.'
    )
    return EventNote(True, Reason.RELAY_NOT_FOUND, message)


def _selector(look: _Look) -> str:
    name = look.key[1]
    sidecar = look.relay is not None and look.relay.spec.runtime is Runtime.SIDECAR
    labels: dict[str, Any] = {RELAY_LABEL: name} if sidecar else selector_labels(name)
    return ",".join(f"{label}={value}" for label, value in labels.items())
