"""State about children and resources: blockers are kept for a while, and deleted objects are removed."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import pytest
from prometheus_client import CollectorRegistry

from mailboat.runtime.config_source import ConfigSource
from mailboat.runtime.manifest_files import load
from mailboat_operator.controller.cache import ResourceCache
from mailboat_operator.controller.children import ApplyResult, ChildApplier, DeletionPending, NameTaken
from mailboat_operator.controller.reconcile import Reconciler
from mailboat_operator.controller.status_writer import StatusWriter
from mailboat_operator.kube.client import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    POD,
    RELAY,
    SERVICE,
    SUBSCRIPTION,
    Kube,
)
from mailboat_operator.kube.errors import (
    ApiUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    ServerFailed,
    Throttled,
)
from mailboat_operator.metrics import Metrics
from mailboat_operator.relays import observation
from mailboat_operator.relays.http_client import PushResponse, RelayClient
from mailboat_operator.relays.pods import relay_pod
from mailboat_operator.relays.reports import Answer, PollTimeouts
from mailboat_operator.relays.signing_keys import Signer, turned
from mailboat_operator.relays.state import ConfigPush, RelayStates, Work
from mailboat_operator.resources import CHILD_KINDS, desired
from mailboat_operator.resources.configmap import Configuration, configuration_in
from mailboat_operator.resources.pod import CONTAINER, RelayImage, relay_labels
from mailboat_spec import OutboxRelay
from mailboat_spec.documents import read_document
from mailboat_spec.relay_status import read_process_status
from support.manifests import Manifest, event_subscription, outbox_relay
from support.relay_statuses import process_status

IMAGE = RelayImage("mailboat-relay:1")
SIGNER = Signer(turned(None, datetime.now(UTC)))
KEY = ("shop", "orders")
FleetT = TypeVar("FleetT", bound=RelayStates)


class Server(Kube):
    """Stub of an API server that accepts all requests, except for those that a test refuses."""

    def __init__(self):
        self.refuses: dict[Any, Exception] = {}
        self.applied: Counter[Any] = Counter()
        self.objects: dict[Any, Any] = {}
        self.statuses: list[Any] = []
        self.unwritable: dict[str, Exception] = {}
        self._version = 100

    async def get(self, kind, namespace, name):
        if kind in self.objects:
            return self.objects[kind]
        raise NotFound(name)

    async def apply(self, kind, body):
        self.applied[kind] += 1
        if kind in self.refuses:
            raise self.refuses[kind]
        return self._stored(body)

    async def create(self, kind, body, *, dry_run=False):
        return self._stored(body)

    async def patch_status(self, kind, found, status):
        if (name := found["metadata"]["name"]) in self.unwritable:
            raise self.unwritable[name]
        self.statuses.append(status)
        return self._stored({**found, "status": {**(found.get("status") or {}), **status}})

    def _stored(self, body):
        self._version += 1
        metadata = {"uid": f"u-{body['kind']}", **body["metadata"], "resourceVersion": str(self._version)}
        return {**body, "metadata": metadata}


class Recorder(RelayStates):
    """Records the configuration versions that would be pushed to relays."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.versions: list[int] = []

    async def push_config(self, key, answers, configuration):
        self.versions.append(configuration.version)
        return ConfigPush()


def server_metadata(name: str) -> Manifest:
    """Return metadata as the API server sets it."""
    return {"uid": f"u-{name}", "generation": 1, "resourceVersion": "1"}


def relay(**spec: Any) -> Manifest:
    return outbox_relay(metadata=server_metadata("orders"), **spec)


def subscription(name: str = "out") -> Manifest:
    return event_subscription(name, metadata=server_metadata(name))


def named_pod(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "shop", "uid": f"u-{name}", "labels": relay_labels("orders")}
    return {"metadata": metadata, "spec": {"containers": [{"name": CONTAINER}]}}


def desired_children(model: OutboxRelay) -> dict[Any, Any]:
    return desired(model, [], Configuration(1, "x"), "keys", IMAGE)


@pytest.mark.parametrize("error", [Invalid("no such field"), Forbidden("a policy")], ids=["refused", "forbidden"])
async def test_a_refused_child_is_not_retried_at_once_unless_it_changes(error):
    server, now = Server(), [0.0]
    applier = ChildApplier(
        server, ResourceCache(), Metrics(CollectorRegistry()), retry_interval=30, clock=lambda: now[0]
    )
    server.refuses[DEPLOYMENT] = error
    model = OutboxRelay.model_validate(relay())
    for _ in range(5):
        now[0] += 4
        result = await applier.apply(model, desired_children(model))
        assert result.blocked == {DEPLOYMENT: error}
        assert result.blocker is not None
        assert result.blocker.message.endswith(f": {error}")
    assert server.applied[DEPLOYMENT] == 1
    assert server.applied[DISRUPTION_BUDGET] >= 1, "one child keeps no other from being kept"
    changed = OutboxRelay.model_validate(relay(replicas=5))
    await applier.apply(changed, desired_children(changed))
    assert server.applied[DEPLOYMENT] == 2, "what is changed is tried at once"
    now[0] += 30
    del server.refuses[DEPLOYMENT]
    result = await applier.apply(changed, desired_children(changed))
    assert (server.applied[DEPLOYMENT], result.blocked, result.blocker) == (3, {}, None)


async def test_a_child_name_in_use_is_retried_when_it_may_be_free():
    server, now = Server(), [0.0]
    applier = ChildApplier(
        server, ResourceCache(), Metrics(CollectorRegistry()), retry_interval=30, clock=lambda: now[0]
    )
    server.objects[SERVICE] = {"metadata": {"name": "orders-relay", "uid": "theirs"}}
    model = OutboxRelay.model_validate(relay())
    for _ in range(2):
        result = await applier.apply(model, desired_children(model))
        assert result.blocker is not None
        assert result.blocker.message.startswith('Service "orders-relay" exists')
        server.objects.clear()
    now[0] += 30
    assert (await applier.apply(model, desired_children(model))).blocker is None
    assert server.applied[SERVICE] == 1


@pytest.mark.parametrize(
    ("errors", "reason", "message"),
    [
        ([Forbidden("a quota"), Forbidden("a policy")], "Forbidden", "its work, which tries again: a quota; a policy"),
        ([Forbidden("a quota"), Invalid("no such field")], "InvalidSpec", "what spec leads to: no such field"),
        (
            [Invalid("no such field"), NameTaken("Service"), NameTaken("Secret")],
            "NameTaken",
            'Service and Secret "x" exists',
        ),
        ([ServerFailed("500")], None, ""),
    ],
)
def test_of_several_blockers_the_one_that_a_person_can_remove_first_is_named(errors, reason, message):
    result = ApplyResult("x", blocked=dict(zip(CHILD_KINDS, errors, strict=False)))
    assert (result.blocker.reason if result.blocker else None) == reason
    assert message in (result.blocker.message if result.blocker else "")


class Stored(Server):
    """Server-side apply as the operator uses it: fields of others stay, and unchanged content is not written."""

    async def apply(self, kind, body):
        self.applied[kind] += 1
        live = self.objects.get(kind, {})
        after = _merged(live, body)
        if after != live:
            self.objects[kind] = after = self._stored(after)
        return after

    def edit(self, kind, change):
        self.objects[kind] = self._stored(_merged(self.objects[kind], change))


def _merged(live, body):
    if not isinstance(live, dict) or not isinstance(body, dict):
        return body
    return {**live, **{name: _merged(live.get(name), value) for name, value in body.items()}}


@pytest.mark.parametrize(
    ("edit", "applied", "restored"),
    [
        ({}, 1, ""),
        ({"status": {"replicas": 2}}, 1, ""),
        ({"metadata": {"managedFields": []}}, 1, ""),
        ({"metadata": {"annotations": {"theirs": "1"}}}, 2, ""),
        ({"spec": {"replicas": 7}}, 2, "spec.replicas"),
        ({"spec": {"replicas": 7, "paused": True}}, 2, "spec.paused, spec.replicas"),
    ],
)
async def test_a_child_is_applied_again_once_if_it_changed_and_restored_fields_are_named(edit, applied, restored):
    server, registry = Stored(), CollectorRegistry()
    applier = ChildApplier(server, ResourceCache(), Metrics(registry))
    model = OutboxRelay.model_validate(relay())
    children = desired_children(model)
    await applier.apply(model, children)
    server.edit(DEPLOYMENT, edit)
    applier.cache.store(DEPLOYMENT, server.objects[DEPLOYMENT])
    events = [event for _ in range(3) for event in (await applier.apply(model, children)).events]
    assert {kind: count for kind, count in server.applied.items() if kind != DEPLOYMENT} == dict.fromkeys(
        (kind for kind in CHILD_KINDS if kind in children and kind != DEPLOYMENT), 1
    )
    assert server.applied[DEPLOYMENT] == applied
    note = f"Deployment orders-relay was changed by another client and is restored: {restored}."
    assert [event.message for event in events] == ([note] if restored else [])
    labels = {"kind": "Deployment"}
    corrected = registry.get_sample_value("mailboat_operator_drift_corrected_total", labels)
    assert corrected == (1.0 if restored else None)


async def test_a_changed_desired_child_is_applied_without_a_drift_event():
    server = Stored()
    applier = ChildApplier(server, ResourceCache(), Metrics(CollectorRegistry()))
    for replicas in (2, 5):
        model = OutboxRelay.model_validate(relay(replicas=replicas))
        assert (await applier.apply(model, desired_children(model))).events == []
    assert server.objects[DEPLOYMENT]["spec"]["replicas"] == 5
    assert (server.applied[DEPLOYMENT], server.applied[SERVICE]) == (2, 1)


class LeaderWork(Generic[FleetT]):
    """A reconciler with its dependencies, and without real servers."""

    def __init__(self, relays: type[FleetT], client: RelayClient | None = None) -> None:
        self.server, self.cache, self.registry = Server(), ResourceCache(), CollectorRegistry()
        metrics = Metrics(self.registry)
        self.applier = ChildApplier(self.server, self.cache, metrics)
        self.reporter = StatusWriter(self.server, self.cache, metrics, "test")
        self.fleet = relays(client or RelayClient(SIGNER), metrics, PollTimeouts())
        self.reconciler = Reconciler(self.cache, self.applier, self.fleet, self.reporter, SIGNER, IMAGE, 5.0)


async def test_no_state_of_deleted_objects_is_kept():
    core = LeaderWork(RelayStates)
    server, cache, reconciler = core.server, core.cache, core.reconciler

    def gauges():
        every = (sample for metric in core.registry.collect() for sample in metric.samples)
        return {each.name for each in every if each.labels.get("namespace") == "shop"}

    assert gauges() == set()
    cache.store(RELAY, relay())
    cache.store(SUBSCRIPTION, subscription())
    server.refuses[DISRUPTION_BUDGET] = Forbidden("a policy")
    await reconciler.reconcile(KEY)

    def remembered():
        memories = (core.reporter._written, core.fleet._relays)
        return [len(each) for each in (*memories, core.applier._applied, core.applier._errors)]

    about = ("pods_without_sidecar", "ready", "relay_pods", "subscription_lag")
    assert gauges() == {f"mailboat_operator_{each}" for each in about}
    assert remembered() == [2, 1, len(CHILD_KINDS) - 1, 1]
    cache.remove(SUBSCRIPTION, {**subscription(), "metadata": {**subscription()["metadata"], "resourceVersion": "900"}})
    cache.remove(RELAY, {**relay(), "metadata": {**relay()["metadata"], "resourceVersion": "901"}})
    await reconciler.reconcile(KEY)
    assert gauges() == set()
    assert remembered() == [0] * 4


async def test_running_relays_get_the_configuration_although_a_child_is_forbidden():
    core = LeaderWork(Recorder)
    server, cache, reconciler = core.server, core.cache, core.reconciler
    versions = core.fleet.versions
    cache.store(RELAY, relay())
    server.refuses[DISRUPTION_BUDGET] = Forbidden("a policy")
    await reconciler.reconcile(KEY)
    assert len(versions) == 1
    server.refuses[CONFIG_MAP] = Forbidden("a quota")
    cache.store(SUBSCRIPTION, subscription())
    await reconciler.reconcile(KEY)
    assert len(versions) == 1, "not before it is in the ConfigMap, where a relay that restarts finds it"


async def test_a_failed_request_does_not_block_the_others():
    core = LeaderWork(Recorder)
    server, cache, reconciler = core.server, core.cache, core.reconciler
    versions = core.fleet.versions
    cache.store(RELAY, relay())
    server.refuses[SERVICE] = ServerFailed("somebody's webhook is down")
    with pytest.raises(ServerFailed):
        await reconciler.reconcile(KEY)
    assert set(server.applied) == set(CHILD_KINDS)
    assert len(versions) == 1
    with pytest.raises(ServerFailed):
        await reconciler.reconcile(KEY)
    assert server.applied[SERVICE] == 2, "it may be over at any moment"
    server.refuses[CONFIG_MAP] = ServerFailed("and for this one")
    cache.store(SUBSCRIPTION, subscription())
    with pytest.raises(ServerFailed):
        await reconciler.reconcile(KEY)
    assert len(versions) == 2, "nothing is told that relays would not find again"


@pytest.mark.parametrize("kind", CHILD_KINDS)
async def test_a_child_that_is_being_deleted_blocks_no_other_child(kind):
    core = LeaderWork(Recorder)
    server, cache, reconciler = core.server, core.cache, core.reconciler
    cache.store(RELAY, relay())
    await reconciler.reconcile(KEY)
    server.applied.clear()
    live = cache.child(kind, KEY)
    assert live is not None
    held = {"deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["example.com/theirs"], "resourceVersion": "900"}
    cache.store(kind, {**live, "metadata": {**live["metadata"], **held}})
    changed = relay(replicas=5)
    cache.store(RELAY, {**changed, "metadata": {**changed["metadata"], "resourceVersion": "901", "generation": 2}})
    cache.store(SUBSCRIPTION, subscription())
    with pytest.raises(DeletionPending, match=f"{kind.name} orders-relay is being deleted"):
        await reconciler.reconcile(KEY)
    going = kind == CONFIG_MAP  # new pods would mount the old configuration, so the new one is not pushed
    assert (kind in server.applied, DEPLOYMENT in server.applied) == (False, kind not in (CONFIG_MAP, DEPLOYMENT))
    assert len(core.fleet.versions) == (1 if going else 2)


@pytest.mark.parametrize("end", ["deleted", "being deleted", "made anew"])
async def test_a_relay_deleted_during_the_poll_gets_no_child_again(end):
    """The children may be orphaned on purpose. Applied with the deleted relay as owner, they would be collected."""

    class Slow(Recorder):
        async def poll(self, key, pods, partitions):
            found = relay()
            metadata = {**found["metadata"], "resourceVersion": "900"}
            match end:
                case "deleted":
                    cache.remove(RELAY, {**found, "metadata": metadata})
                case "being deleted":
                    going = {"deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["orphan"]}
                    cache.store(RELAY, {**found, "metadata": {**metadata, **going}})
                case "made anew":
                    cache.store(RELAY, {**found, "metadata": {**metadata, "uid": "u-next"}})
            return await super().poll(key, pods, partitions)

    core = LeaderWork(Slow)
    server, cache, reconciler = core.server, core.cache, core.reconciler
    queued: list[Any] = []
    cache.store(RELAY, relay())
    cache.on_change = queued.append
    assert await reconciler.reconcile(KEY) is None
    assert (server.applied, server.statuses, core.fleet.versions) == ({}, [], [])
    assert queued == [KEY], "which brings the next look"


async def test_a_subscription_is_read_once_per_version_and_beside_the_loop(monkeypatch):
    core = LeaderWork(RelayStates)
    cache, reconciler = core.cache, core.reconciler
    cache.store(RELAY, relay())
    for number in range(20):
        cache.store(SUBSCRIPTION, subscription(f"s{number}"))
    threads = []

    def counted(source, body):
        threads.append(threading.current_thread())
        return read_document(source, body)

    monkeypatch.setattr(observation, "read_document", counted)
    await reconciler.reconcile(KEY)
    before = configuration_in(cache.child(CONFIG_MAP, KEY))
    threads.clear()  # the first reconcile wrote statuses, so the cached objects have new versions
    await reconciler.reconcile(KEY)
    assert len(threads) == 1 + 20, "the relay, and each of them"
    assert threads.count(threading.main_thread()) == 1
    await reconciler.reconcile(KEY)
    assert len(threads) == 2 + 20
    invalid = {"relayRef": {"name": "orders"}, "nonsense": True}
    for number in range(20):
        found = subscription(f"s{number}")
        cache.store(
            SUBSCRIPTION, {**found, "metadata": {**found["metadata"], "resourceVersion": "900"}, "spec": invalid}
        )
    await reconciler.reconcile(KEY)
    assert configuration_in(cache.child(CONFIG_MAP, KEY)) == before, "relays go on with what they know"


class Wire(RelayClient):
    """Replaces HTTP by one relay in this process that applies pushed configurations."""

    def __init__(self, relay: ConfigSource) -> None:
        super().__init__(SIGNER)
        self.relay = relay

    async def status(self, pod, relay, partitions):
        version = self.relay.report.version
        return Answer(pod, process_status({"config": {"version": version}}))

    async def put_config(self, pod, content):
        assert len(content) < 1024 * 1024
        await self.relay.push(content)
        return PushResponse(200, "")


async def test_2000_subscriptions_arrive_at_the_relay_and_so_does_a_pause(tmp_path):
    """Uncompressed, the configuration exceeds the limit of a ConfigMap."""
    followed = ConfigSource(lambda _: None)
    core = LeaderWork(RelayStates, Wire(followed))
    kafka = {"bootstrapServers": [f"kafka-{number}.kafka.svc:9092" for number in range(3)], "topic": "orders"}
    every = [subscription(f"orders-to-kafka-{number}") for number in range(2000)]
    for each in every:
        each["spec"].update(sink={"kafka": kafka}, filter={"eventTypes": [f"order.kind-{kind}" for kind in range(15)]})
        core.cache.store(SUBSCRIPTION, each)
    core.cache.store(RELAY, relay())
    core.cache.store(POD, {**named_pod("orders-relay-0")})
    await core.reconciler.reconcile(KEY)
    last = core.cache.subscriptions_of(KEY)[-1]
    metadata = {**last["metadata"], "resourceVersion": "9000", "generation": 2}
    core.cache.store(SUBSCRIPTION, {**last, "metadata": metadata, "spec": {**last["spec"], "state": "Paused"}})
    await core.reconciler.reconcile(KEY)
    assert followed.current is not None
    states = {each.metadata.name: each.spec.state for each in followed.current.subscriptions}
    assert (len(states), {name for name, state in states.items() if state == "Paused"}) == (2000, {metadata["name"]})
    stored = core.cache.child(CONFIG_MAP, KEY)
    assert stored is not None
    mounted = tmp_path / "resources.yaml"  # the file that a starting relay reads
    mounted.write_bytes(base64.b64decode(stored["binaryData"]["resources.yaml"]))
    assert load([mounted]).subscriptions == followed.current.subscriptions


@pytest.mark.parametrize("error", [Invalid("422"), Conflict("409"), ApiUnavailable("no answer"), Throttled("429")])
async def test_a_failed_status_write_does_not_block_others_unless_the_server_throttles(error):
    core = LeaderWork(RelayStates)
    server, cache, reconciler = core.server, core.cache, core.reconciler
    cache.store(RELAY, relay())
    for name in ("one", "other"):
        cache.store(SUBSCRIPTION, subscription(name))
    server.unwritable["one"] = error
    with pytest.raises(type(error)):
        await reconciler.reconcile(KEY)
    assert len(server.statuses) == (0 if isinstance(error, Throttled) else 2)


async def test_a_newer_assignment_of_one_relay_counts_for_all():
    """If each of a hundred refusals counted, the generation would grow beyond a bigint."""
    asked = []

    class Client(RelayClient):
        async def put_assignment(self, pod, assignment):
            asked.append(assignment.generation)
            return PushResponse(409, "a newer one is known")

    relays = RelayStates(Client(SIGNER), Metrics(CollectorRegistry()), PollTimeouts(), wall_clock=lambda: 1_000.0)
    report = {"relays": [{"name": "shop/orders", "databaseReachable": True, "subscriptions": [{"name": "shop/out"}]}]}
    pods = [relay_pod(named_pod(f"orders-relay-{number}")) for number in range(100)]
    answers = [Answer(pod, read_process_status(json.dumps(report).encode())) for pod in pods]
    work = [Work("shop/out", 4, frozenset())]
    for _ in range(100):
        assert await relays.push_assignment(KEY, work, answers, Configuration(0, ""))
    assert len(asked) == 100
    assert [each - 1_000_000 for each in asked[:5]] == [0, 1000, 2000, 4000, 8000]
    assert asked[-1] < 2**63, "Postgres and relays can take it"


@pytest.mark.parametrize(("error", "reported"), [(ApiUnavailable("500"), True), (Throttled("429"), False)])
async def test_a_lasting_reconcile_failure_is_reported_unless_the_server_throttles(error, reported):
    core = LeaderWork(RelayStates)
    server, cache, reconciler = core.server, core.cache, core.reconciler
    cache.store(RELAY, relay())
    server.refuses[SERVICE] = error
    for attempt in range(1, 6):
        with pytest.raises(type(error)):
            await reconciler.reconcile(KEY)
        assert bool(server.statuses) == (reported and attempt == 5)
    if reported:
        (ready,) = (each for each in server.statuses[-1]["conditions"] if each["type"] == "Ready")
        assert (ready["status"], ready["reason"]) == ("False", "Progressing")
        assert "500" in ready["message"]
    del server.refuses[SERVICE]
    await reconciler.reconcile(KEY)
    (ready,) = (each for each in server.statuses[-1]["conditions"] if each["type"] == "Ready")
    assert ready["reason"] == "Starting"
