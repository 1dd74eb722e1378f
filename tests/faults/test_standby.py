"""Standbys: a synchronous one, a promotion hidden by a pooler, and a standby that relays must not read.

`test_lost_tail` covers the events that a lagging standby loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.pgbouncer import PgBouncer, start_pgbouncer
from mailboat_devservers.postgres import PostgresServer
from mailboat_devservers.proxy import Proxy
from support.collectors import KafkaCollector
from support.ledger import check_delivery, in_the_table
from support.lost_tail import assert_reused, cut_off, of, write
from support.manifests import kafka_sink
from support.relay_processes import WALKING, Fleet, RelayProcess, outbox_relay, subscription
from support.wait import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def standby(primary: PostgresServer, tmp_path: Path) -> Iterator[PostgresServer]:
    with primary, primary.clone_standby(tmp_path / "standby") as standby:
        yield standby


@pytest.fixture
def awaited(primary: PostgresServer, standby: PostgresServer) -> PostgresServer:
    """The standby as a synchronous one: commits wait for it unless they set a lower level."""
    primary.execute("alter system set synchronous_standby_names = '*'")
    primary.execute("select pg_reload_conf()")
    wait_until(
        lambda: primary.execute("select sync_state from pg_stat_replication") == [("sync",)],
        60,
        "a synchronous standby",
    )
    return standby


def _stream(kfake: KafkaServer, collector: KafkaCollector) -> dict[str, object]:
    return subscription("kfake", kafka_sink(kfake.bootstrap, collector.topic), partitions=1)


_WAITING = "select pid from pg_stat_activity where application_name = 'mailboat work' and wait_event = 'SyncRep'"


def _waits_for_the_standby(primary: PostgresServer) -> bool:
    """Return True if a relay has committed the opening of a window and waits for the standby to confirm."""
    return len(primary.execute(_WAITING)) > 0


def test_a_window_that_the_standby_never_confirmed_is_not_published_by_the_next_owner(
    primary: PostgresServer, awaited: PostgresServer, kfake: KafkaServer, collector: KafkaCollector, tmp_path: Path
) -> None:
    """The opening of the window is committed on the primary. The session that waits for the standby is terminated."""
    manifests = [outbox_relay(primary.url(), durability="Replicated"), _stream(kfake, collector)]
    with Fleet(tmp_path / "fleet", manifests, timings=None) as fleet:
        [relay] = fleet.start_connected(1)
        collector.until_all([row.event.event_id for row in write(primary.url(), 20)])
        with _suspended(awaited):
            late = [row.event.event_id for row in write(primary.url(), 20, asynchronous=True)]
            for times in (2, 3):
                wait_until(lambda: _waits_for_the_standby(primary), 60, "the relay to wait for the standby")
                primary.execute(f"select pg_terminate_backend(pid) from ({_WAITING}) as waiting")
                relay.until_connected(times=times)
            wait_until(lambda: _waits_for_the_standby(primary), 60, "the relay to wait for the standby again")
            assert not of(late, collector.arrivals), "published, and only the primary had it"
        collector.until_all(late)
        collector.until_quiet()
        check_delivery(in_the_table(primary.url()), (), collector.arrivals)


@pytest.mark.verify
def test_a_standby_that_hangs_holds_up_no_event_that_need_not_wait_for_it_and_no_relay(
    primary: PostgresServer, awaited: PostgresServer, kfake: KafkaServer, collector: KafkaCollector, tmp_path: Path
) -> None:
    manifests = [outbox_relay(primary.url(), durability="Flushed"), _stream(kfake, collector)]
    with Fleet(tmp_path / "fleet", manifests, timings=None) as fleet:
        [first] = fleet.start_connected(1)
        collector.until_all([row.event.event_id for row in write(primary.url(), 20)])
        with _suspended(awaited):
            _until_beats(primary, first, times=3)
            collector.until_all([row.event.event_id for row in write(primary.url(), 20, asynchronous=True)])
            # A relay that starts, or takes over partitions, writes more than heartbeats.
            fleet.start_connected(1)
            fleet.kill(first)
            collector.until_all([row.event.event_id for row in write(primary.url(), 20, asynchronous=True)])
        collector.until_quiet()
        check_delivery(in_the_table(primary.url()), (), collector.arrivals, kills=1)


def _until_beats(primary: PostgresServer, relay: RelayProcess, times: int) -> None:
    seen = set()

    def beats() -> bool:
        seen.update(primary.execute("select beat_at from mailboat.relays"))
        return len(seen) > times

    wait_until(beats, 60, f"{times} heartbeats; {relay.log_tail()}")


@contextmanager
def _suspended(server: PostgresServer) -> Iterator[None]:
    server.suspend()
    try:
        yield
    finally:
        server.resume()


def test_with_replicated_durability_events_of_a_lost_primary_were_never_published(
    primary: PostgresServer,
    awaited: PostgresServer,
    kfake: KafkaServer,
    collector: KafkaCollector,
    tmp_path: Path,
) -> None:
    url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{awaited.port}/postgres"
    manifests = [outbox_relay(url, durability="Replicated"), _stream(kfake, collector)]
    with Fleet(tmp_path / "fleet", manifests, limits=WALKING) as fleet:
        [relay] = fleet.start_connected(1)
        collector.until_all([row.event.event_id for row in write(primary.url(), 100)])
        cut_off(primary, awaited)
        tail = write(primary.url(), 100, asynchronous=True)
        wait_until(lambda: _waits_for_the_standby(primary), 60, "the relay to wait for the standby")
        primary.kill()
        awaited.execute("alter system set synchronous_standby_names = ''")
        awaited.promote()
        later = write(awaited.url(), 200)
        assert_reused(tail, later)
        truth = in_the_table(awaited.url())
        lost = {row.event.event_id for row in tail}
        assert not lost & truth.keys()
        relay.until_connected(times=2)
        collector.until_all(truth, timeout=60)
        collector.until_quiet()
        check_delivery(truth, lost, collector.arrivals, kills=1)


@pytest.mark.verify
def test_a_promotion_that_a_pooler_hides_is_noticed_before_anything_in_memory_is_believed(
    primary: PostgresServer,
    standby: PostgresServer,
    kfake: KafkaServer,
    collector: KafkaCollector,
    proxy_factory: Callable[[int], Proxy],
    or_skip: Callable[[Callable[[], PgBouncer]], PgBouncer],
    tmp_path: Path,
) -> None:
    """The connections of the relays stay open, but the server behind them changes to one with another history."""
    proxy = proxy_factory(primary.port)
    with or_skip(lambda: start_pgbouncer(tmp_path / "bouncer", proxy)) as bouncer:
        stream = subscription("kfake", kafka_sink(kfake.bootstrap, collector.topic), partitions=4)
        manifests = [outbox_relay(bouncer.url()), stream]
        with Fleet(tmp_path / "fleet", manifests, limits=WALKING) as fleet:
            relays = fleet.start_connected(2)
            early = write(primary.url(), 200)
            collector.until_all([row.event.event_id for row in early])
            cut_off(primary, standby)
            tail = write(primary.url(), 300)
            collector.until_all([row.event.event_id for row in tail])
            _hold_between_transactions(primary, relays)

            primary.kill()
            standby.promote()
            later = write(standby.url(), 400)
            assert_reused(tail, later)
            proxy.retarget(standby.port)
            for relay in relays:
                relay.resume()
            truth = in_the_table(standby.url())
            collector.until_all(truth, timeout=60)
            collector.until_quiet()
            for relay in relays:
                assert "another server answers now" in relay.log.read_text(), relay.log_tail()
        lost = {row.event.event_id for row in tail}
        assert {arrival.event_id for arrival in collector.arrivals} <= truth.keys() | lost
        check_delivery(truth, (), of(truth.keys(), collector.arrivals), kills=1, gapless=False)


def _hold_between_transactions(primary: PostgresServer, relays: list[RelayProcess]) -> None:
    """Suspend the relays while none has an open transaction. The pooler would close such a connection."""

    def held() -> bool:
        for relay in relays:
            relay.suspend()
        busy = "select 1 from pg_stat_activity where application_name ~ '^mailboat ' and state <> 'idle'"
        if not primary.execute(busy):
            return True
        for relay in relays:
            relay.resume()
        return False

    wait_until(held, 60, "a moment between transactions")


@pytest.mark.verify
def test_a_relay_on_a_standby_reports_the_remedy_and_continues_after_the_promotion(
    primary: PostgresServer, standby: PostgresServer, kfake: KafkaServer, collector: KafkaCollector, tmp_path: Path
) -> None:
    rows = write(primary.url(), 10)
    manifests = [outbox_relay(standby.url()), _stream(kfake, collector)]
    with Fleet(tmp_path / "fleet", manifests, timings=None) as fleet:
        relay = fleet.start()
        wait_until(lambda: "use the primary" in relay.log.read_text(), 60, f"a word about it; {relay.log_tail()}")
        assert "Traceback" not in relay.log.read_text()
        assert not collector.arrivals
        cut_off(primary, standby)
        standby.promote()
        collector.until_all([row.event.event_id for row in rows])
