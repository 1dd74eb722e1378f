"""Database outages: connections are refused, connections stay open without data, or one relay is cut off.

Delivery resumes without intervention, and no event is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from mailboat.runtime.timings import Timings
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import Database
from mailboat_devservers.proxy import Proxy
from support.collectors import KafkaCollector
from support.ledger import check_delivery
from support.manifests import Manifest, kafka_sink
from support.racing_writers import Racers
from support.relay_processes import SWIFT, WALKING, Fleet, outbox_relay, owners, subscription
from support.wait import wait_until

AWAY = 10.0
HASTY = replace(SWIFT, deadline=AWAY / 2)


@pytest.fixture
def proxy(outbox: Database, proxy_factory: Callable[[int], Proxy]) -> Proxy:
    """Proxy between the relays and their database. Writers connect directly."""
    return proxy_factory(outbox.server.port)


@pytest.fixture
def manifests(kfake: KafkaServer, collector: KafkaCollector) -> Callable[[str], list[Manifest]]:
    stream = subscription("kfake", kafka_sink(kfake.bootstrap, collector.topic), delivery={"timeout": "2s"})
    return lambda url: [outbox_relay(url), stream]


def through(proxy: Proxy, url: str) -> str:
    return url.replace(f":{urlsplit(url).port}/", f":{proxy.port}/")


def catch_up(racers: Racers, collector: KafkaCollector) -> None:
    """Wait until delivery resumes, and check that no event is lost. In-flight events of the outage may arrive twice."""
    back = time.monotonic()
    wait_until(lambda: collector.arrivals[-1].at > back, 30, "delivery to go on after the database came back")
    resumed = time.monotonic() - back
    racers.wait(1.0)
    ledger = racers.finish()
    collector.until_all(ledger.committed, timeout=60)
    collector.until_quiet()
    found = check_delivery(ledger.committed, ledger.rolled_back, collector.arrivals, kills=1)
    print(f"{found}; resumed after {resumed:.1f} s")  # noqa: T201 - shown with -s


@pytest.mark.verify
@pytest.mark.parametrize(
    ("leave", "come_back", "timings"),
    [
        pytest.param(Proxy.stop, Proxy.start, None, id="refused"),
        pytest.param(Proxy.deafen, Proxy.undeafen, None, id="deaf-for-less-than-the-deadline"),
        pytest.param(Proxy.deafen, Proxy.undeafen, HASTY, id="deaf-for-longer-than-the-deadline"),
    ],
)
def test_a_database_outage_of_ten_seconds_under_load(
    leave: Callable[[Proxy], None],
    come_back: Callable[[Proxy], None],
    timings: Timings | None,
    outbox: Database,
    proxy: Proxy,
    manifests: Callable[[str], list[Manifest]],
    collector: KafkaCollector,
    tmp_path: Path,
) -> None:
    with (
        Fleet(tmp_path / "fleet", manifests(through(proxy, outbox.url)), timings=timings, limits=WALKING) as fleet,
        Racers(outbox.url, writers=4, seed=31) as racers,
    ):
        fleet.start_connected(2)
        wait_until(lambda: collector.arrivals, 60, "the first event")
        leave(proxy)
        racers.wait(AWAY)
        come_back(proxy)
        catch_up(racers, collector)
        assert len(fleet.working) == 2


def _until_delivered(collector: KafkaCollector) -> None:
    arrived = len(collector.arrivals)
    wait_until(lambda: len(collector.arrivals) > arrived, 60, "delivery after the last cut")


@pytest.mark.verify
def test_connections_that_are_cut_again_and_again(
    outbox: Database,
    proxy: Proxy,
    manifests: Callable[[str], list[Manifest]],
    collector: KafkaCollector,
    tmp_path: Path,
) -> None:
    with (
        Fleet(tmp_path / "fleet", manifests(through(proxy, outbox.url)), limits=WALKING) as fleet,
        Racers(outbox.url, writers=4, seed=32) as racers,
    ):
        fleet.start_connected(2)
        for _ in range(5):
            _until_delivered(collector)
            proxy.cut()
            racers.wait(0.5)
        catch_up(racers, collector)


@pytest.mark.verify
@pytest.mark.parametrize("pooler", ["Direct", "Transaction"])
def test_a_relay_that_vanishes_does_not_block_other_relays(
    pooler: str,
    outbox: Database,
    proxy: Proxy,
    manifests: Callable[[str], list[Manifest]],
    collector: KafkaCollector,
    tmp_path: Path,
) -> None:
    """The machine of a relay disappears without a FIN, and the sessions of the relay stay on the server.

    With a direct connection these sessions hold session locks. With ``pooler: Transaction``, a tick is one transaction,
    and an open one locks cursors.
    """
    timings = replace(HASTY, lease_ttl=4.0)
    vanishing = manifests(through(proxy, outbox.url))
    vanishing[0]["spec"]["database"]["pooler"] = pooler
    with (
        Fleet(tmp_path / "lost", vanishing, timings=timings) as lost,
        Fleet(tmp_path / "fleet", manifests(outbox.url), timings=timings) as fleet,
        Racers(outbox.url, writers=4, seed=33) as racers,
    ):
        gone, heir = lost.start("gone"), fleet.start("heir")
        wait_until(lambda: set(owners(outbox.url).values()) == {"gone", "heir"}, 60, "both relays to own something")
        if pooler == "Direct":
            proxy.deafen()
        else:
            _deafen_in_a_transaction(outbox, proxy)
        gone.suspend()
        wait_until(lambda: set(owners(outbox.url).values()) == {"heir"}, 60, "the other relay to take over")
        heir.until_connected()
        catch_up(racers, collector)


def _deafen_in_a_transaction(outbox: Database, proxy: Proxy) -> None:
    """Stop the data of the proxy while a session behind it has an open transaction that locks cursors."""

    def caught() -> bool:
        proxy.deafen()
        holding = outbox.execute(
            "select a.client_port from pg_stat_activity a join pg_locks l using (pid)"
            " where a.state = 'idle in transaction' and a.application_name ~ '^mailboat '"
            " and l.relation = 'mailboat.cursors'::regclass and l.mode = 'RowExclusiveLock'"
        )
        ours = {connection.laddr.port for connection in psutil.Process().net_connections("tcp4")}
        found = any(port in ours for (port,) in holding)  # the proxy runs in this process, the other relay does not
        if not found:
            proxy.undeafen()
        return found

    wait_until(caught, 60, "an open transaction of the relay")
