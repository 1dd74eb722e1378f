"""Claims during failures of Redis, the network or a consumer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis.asyncio

from mailboat.consumer.broker.interfaces import Busy, Claim, Claimed, ClaimsUnavailable, FailedAttempt, Finished
from mailboat.consumer.claims.redis_health import EVICTS_KEYS, MEMORY_LOST, NOT_REPLICATED
from mailboat.consumer.claims.redis_store import RedisClaims
from mailboat.consumer.claims.scripts import Replication
from mailboat_devservers.ports import free_port
from mailboat_devservers.proxy import Proxy
from mailboat_devservers.redis_server import RedisServer, start_cluster, start_redis, start_sentinel, start_valkey
from support.certificate_authority import Authority
from support.claim_stores import StoreFactory
from support.wait import await_until, wait_until

E1 = [Claim("e1")]
OrSkip = Callable[[Callable[[], RedisServer]], RedisServer]


@pytest.fixture
def own_servers() -> Iterator[ExitStack]:
    """Stack for servers of one test, stopped after it."""
    with ExitStack() as stack:
        yield stack


# -- lost replies ------------------------------------------------------------------------------------------------------


async def test_a_lost_reply_makes_bare_setnx_skip_the_event_and_ours_handle_it(
    each_redis: RedisServer, proxy_factory: Callable[[int], Proxy], store_at: StoreFactory, consumer: str
) -> None:
    proxy = proxy_factory(each_redis.port)
    bare = redis.asyncio.Redis(port=proxy.port)  # with the default retries of redis-py
    await bare.ping()
    proxy.lose_reply()
    # The retry reports a duplicate, so the event would be lost.
    assert await bare.set(f"bare:{consumer}", "1", nx=True, ex=60) is None
    await bare.aclose()

    store = await store_at(f"redis://127.0.0.1:{proxy.port}")
    await store.claim([Claim("warm")])
    proxy.lose_reply()
    assert await store.claim(E1) == [Claimed(1)]
    proxy.lose_reply()
    assert await store.fail([FailedAttempt("e1", 0)]) == [True]
    assert await store.claim(E1) == [Claimed(2)]
    proxy.lose_reply()
    assert await store.done(["e1"]) == [True]
    assert await store.claim(E1) == [Finished()]


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_a_frozen_consumer_is_taken_over_and_its_done_is_refused(
    each_redis: RedisServer, store_at: StoreFactory
) -> None:
    frozen = await store_at(each_redis.url, instance="frozen", lease=0.3)
    awake = await store_at(each_redis.url, instance="awake")
    assert await frozen.claim(E1) == [Claimed(1)]
    frozen._renewal.stop()  # as SIGSTOP would
    (busy,) = await awake.claim(E1)
    assert isinstance(busy, Busy)

    async def taken_over() -> bool:
        return await awake.claim(E1) == [Claimed(2, 1)]

    await await_until(taken_over)
    assert await frozen.done(["e1"]) == [False]
    assert await awake.done(["e1"]) == [True]
    assert await frozen.done(["e1"]) == [False]


async def test_leases_are_renewed_while_the_event_loop_is_blocked(
    each_redis: RedisServer, store_at: StoreFactory, consumer: str
) -> None:
    store = await store_at(each_redis.url, lease=0.6)
    other = await store_at(each_redis.url, instance="other")
    await store.claim(E1)
    client = each_redis.client()
    first = client.get(f"test:{consumer}:e1")
    wait_until(lambda: client.get(f"test:{consumer}:e1") != first)  # blocks the loop
    time.sleep(1.2)  # noqa: ASYNC251 (two leases)
    assert isinstance((await other.claim(E1))[0], Busy)
    assert await store.done(["e1"]) == [True]


# -- outages, restarts, lost data -------------------------------------------------------------------------------------


async def test_an_outage_costs_no_attempt_and_ends_without_a_restart(
    own_servers: ExitStack, store_at: StoreFactory
) -> None:
    server = own_servers.enter_context(start_valkey())
    store = await store_at(server.url, timeout=0.5)
    assert await store.claim(E1) == [Claimed(1)]
    server.suspend()
    with pytest.raises(ClaimsUnavailable, match=r"Redis at 127\.0\.0\.1:\d+ did not answer in time"):
        await store.done(["e1"])
    server.resume()
    assert await store.done(["e1"]) == [True]  # even if Redis executed the first call
    server.kill()
    with pytest.raises(ClaimsUnavailable, match="can't be reached"):
        await store.claim([Claim("e2")])
    server.launch()
    assert await store.claim([Claim("e2")]) == [Claimed(1)]


async def test_a_server_that_lost_its_memory_is_noticed_and_running_events_stay_claimed(
    own_servers: ExitStack, store_at: StoreFactory
) -> None:
    server = own_servers.enter_context(start_valkey())
    store = await store_at(server.url, lease=0.6, check_every=0)
    other = await store_at(server.url, instance="other", check_every=0, lease=0.6)
    await store.claim([*E1, Claim("e2")])
    await store.done(["e2"])
    assert not store.problems
    server.kill()
    server.launch()  # without its data
    await await_until(lambda: MEMORY_LOST in [problem.reason for problem in store.problems])
    await await_until(lambda: MEMORY_LOST in [problem.reason for problem in other.problems])
    assert "UTC: events that are delivered again are handled again" in store.problems[0].message
    await await_until(lambda: server.client().exists(f"{store._prefix}e1"))
    assert isinstance((await other.claim(E1))[0], Busy)
    assert await other.claim([Claim("e2")]) == [Claimed(1)]  # handled again, as documented
    late = await store_at(server.url, instance="late")
    assert [problem.reason for problem in late.problems] == [MEMORY_LOST]


async def test_an_unavailable_server_at_the_start_is_used_later(own_servers: ExitStack, store_at: StoreFactory) -> None:
    server = own_servers.enter_context(start_valkey())
    server.kill()
    store = await store_at(server.url)
    with pytest.raises(ClaimsUnavailable):
        await store.claim(E1)
    server.launch()
    assert await store.claim(E1) == [Claimed(1)]


POLICIES = ["noeviction", "volatile-ttl", "volatile-lru", "allkeys-lru", "allkeys-random"]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_full_server(own_servers: ExitStack, store_at: StoreFactory, policy: str) -> None:
    server = own_servers.enter_context(start_valkey(options={"maxmemory": "16mb", "maxmemory-policy": policy}))
    store = await store_at(server.url, check_every=0, lease=0.6)
    running = [f"running-{number}" for number in range(200)]
    assert set(await store.claim([Claim(event_id) for event_id in running])) == {Claimed(1)}
    client = server.client()

    async def fill() -> None:
        for first in range(0, 200_000, 500):
            if client.info("stats")["evicted_keys"]:
                return
            ids = [f"event-{first + number:08}-{'x' * 20}" for number in range(500)]
            await store.claim([Claim(event_id) for event_id in ids])
            await store.done(ids)

    if policy == "noeviction":
        with pytest.raises(ClaimsUnavailable, match="is full and refuses to write: raise maxmemory"):
            await fill()
        assert not store.problems
    else:
        await fill()
        assert int(client.info("stats")["evicted_keys"]) > 0  # done events are forgotten, as documented
        assert store.problems[0].reason == EVICTS_KEYS
    # Claims of running events are renewed or restored, and the events can finish.
    keys = [f"{store._prefix}{event_id}" for event_id in running]
    await await_until(lambda: client.exists(*keys) == 200)
    assert set(await store.done(running)) == {True}


async def test_a_failover_loses_the_last_writes_at_most(
    own_servers: ExitStack, store_at: StoreFactory, proxy_factory: Callable[[int], Proxy]
) -> None:
    primary = own_servers.enter_context(start_redis())
    replica = own_servers.enter_context(start_redis(options={"replicaof": f"127.0.0.1 {primary.port}"}))
    proxy = proxy_factory(primary.port)
    wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up")
    store = await store_at(f"redis://127.0.0.1:{proxy.port}", replicas=1)
    usual, store._replication = store._replication, Replication(1, within=60)  # a busy replica confirms later
    assert await store.claim(E1) == [Claimed(1)]
    assert await store.done(["e1"]) == [True]
    assert not store.problems
    store._replication = usual
    replica.client().replicaof("no", "one")  # stops the replication
    assert await store.claim([Claim("e2")]) == [Claimed(1)]
    assert [problem.reason for problem in store.problems] == [NOT_REPLICATED]
    assert await store.done(["e2"]) == [True]
    proxy.retarget(replica.port)
    assert await store.claim([*E1, Claim("e2")]) == [Finished(), Claimed(1)]  # e2 is handled twice, as documented
    replica.client().replicaof("127.0.0.1", str(primary.port))
    with pytest.raises(ClaimsUnavailable, match="is a read-only replica"):
        await store.claim([Claim("e3")])


# -- rights and connections -------------------------------------------------------------------------------------------

RIGHTS = "resetkeys ~test:* resetchannels -@all +evalsha +script|load +get +set +del +expire +time +info +wait"


async def test_a_user_with_the_documented_rights(each_redis: RedisServer, store_at: StoreFactory) -> None:
    client = each_redis.client()
    client.execute_command("ACL", "SETUSER", "claims", "on", ">hunter2", *RIGHTS.split())
    client.execute_command("SCRIPT", "FLUSH")
    url = f"redis://claims:hunter2@127.0.0.1:{each_redis.port}"
    store = await store_at(url, lease=0.3, check_every=0)
    assert await store.claim(E1) == [Claimed(1)]
    await await_until(lambda: store._facts is not None)
    assert await store.fail([FailedAttempt("e1", 0, counted=False)]) == [True]
    assert await store.claim(E1) == [Claimed(1)]
    assert await store.done(["e1"]) == [True]
    client.execute_command("ACL", "SETUSER", "claims", "-get")  # a refused command does not reveal an event's state
    assert await store.claim([Claim("e2")]) == [Claimed(1)]
    for call in (store.done, store.dead, store.release):
        with pytest.raises(ClaimsUnavailable, match="refuses GET or SET to this user"):
            await call(["e2"])
    client.execute_command("ACL", "SETUSER", "claims", "-set")
    with pytest.raises(ClaimsUnavailable, match="refuses GET or SET to this user"):
        await store.claim([Claim("e3")])
    client.execute_command("ACL", "SETUSER", "claims", "-evalsha")
    with pytest.raises(ClaimsUnavailable, match="refuses evalsha to this user"):
        await store.claim(E1)
    client.execute_command("ACL", "SETUSER", "claims", "resetpass")
    with pytest.raises(ClaimsUnavailable, match="refuses the user name or the password") as refused:
        await (await store_at(url)).claim(E1)
    assert "hunter2" not in f"{refused.value!r} {store._connections!r}"


async def test_tls(own_servers: ExitStack, store_at: StoreFactory, tmp_path: Path) -> None:
    authority = Authority("tests")
    for name, text in (("ca.pem", authority.certificate), ("key.pem", authority.keystore())):
        (tmp_path / name).write_text(text)
    tls_port = free_port()
    options = {
        "tls-port": str(tls_port),
        "tls-cert-file": str(tmp_path / "key.pem"),
        "tls-key-file": str(tmp_path / "key.pem"),
        "tls-ca-cert-file": str(tmp_path / "ca.pem"),
        "tls-auth-clients": "no",
    }
    own_servers.enter_context(start_redis(options=options))
    store = await store_at(f"rediss://127.0.0.1:{tls_port}", ca_pem=authority.certificate)
    assert await store.claim(E1) == [Claimed(1)]
    distrustful = await store_at(f"rediss://127.0.0.1:{tls_port}")
    with pytest.raises(ClaimsUnavailable, match="certificate"):
        await distrustful.claim(E1)


@pytest.mark.verify
async def test_a_cluster(own_servers: ExitStack, store_at: StoreFactory, tmp_path: Path) -> None:
    nodes = [own_servers.enter_context(node) for node in start_cluster(tmp_path)]
    store = await store_at(f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}", lease=0.6)
    ids = [f"e{number}" for number in range(60)]
    claims = [Claim(event_id) for event_id in ids]
    assert await store.claim(claims) == [Claimed(1)] * 60
    assert min(node.client().dbsize() for node in nodes) > 5
    assert await store.fail([FailedAttempt(event_id, 0) for event_id in ids]) == [True] * 60
    assert await store.claim(claims) == [Claimed(2)] * 60
    for node in nodes:
        node.client().script_flush()
    other = await store_at(f"redis+cluster://127.0.0.1:{nodes[2].port}", instance="other")
    assert {type(answer) for answer in await other.claim(claims)} == {Busy}
    time.sleep(1.2)  # noqa: ASYNC251 (two leases, renewed by the thread)
    assert await store.done(ids) == [True] * 60
    assert await other.claim(claims) == [Finished()] * 60
    nodes[0].kill()
    with pytest.raises(ClaimsUnavailable):
        await store.claim([Claim(f"late-{number}") for number in range(60)])


@pytest.mark.verify
async def test_sentinel_leads_to_the_new_primary(
    own_servers: ExitStack, store_at: StoreFactory, tmp_path: Path
) -> None:
    primary = own_servers.enter_context(start_valkey(tmp_path / "primary"))
    replica = own_servers.enter_context(
        start_valkey(tmp_path / "replica", options={"replicaof": f"127.0.0.1 {primary.port}"})
    )
    sentinel = own_servers.enter_context(start_sentinel(tmp_path / "sentinel", primary))
    wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up")
    wait_until(lambda: int(sentinel.client().info("sentinel")["master0"]["slaves"]) == 1)
    store = await store_at(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", replicas=1, timeout=1.0)
    assert await store.claim(E1) == [Claimed(1)]
    assert await store.done(["e1"]) == [True]
    primary.kill()

    async def answers() -> bool:
        try:
            return await store.claim(E1) == [Finished()]
        except ClaimsUnavailable:
            return False

    await await_until(answers)
    await await_until(lambda: [problem.reason for problem in store.problems] == [NOT_REPLICATED])


def test_the_store_has_the_claim_stores_methods() -> None:
    from mailboat.consumer.broker.interfaces import ClaimStore

    store: ClaimStore = RedisClaims("redis://127.0.0.1", consumer="billing")
    assert store
