"""Loss of the end of the WAL: a crash with asynchronous commits, and the promotion of a lagging standby.

The server then assigns positions and transaction ids a second time, to other events. Each test checks that this
happened, and that every event in the final table was delivered under its own identity.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import TopicFactory
from mailboat_devservers.kafka import KafkaServer
from mailboat_devservers.postgres import PostgresServer
from support.collectors import KafkaCollector
from support.ledger import check_delivery, in_the_table
from support.lost_tail import Row, assert_reused, cut_off, hold_the_log_writer, of, write
from support.manifests import kafka_sink
from support.relay_processes import WALKING, Fleet, outbox_relay, subscription


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("durability", ["Flushed", "Committed"])
def test_a_crash_that_loses_asynchronous_commits(
    durability: str, each_primary: PostgresServer, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(kfake)
    manifests = [
        outbox_relay(each_primary.url(), durability=durability),
        subscription("kfake", kafka_sink(kfake.bootstrap, topic), partitions=4),
    ]
    written: list[Row] = []
    lost: list[Row] = []
    with (
        each_primary,
        Fleet(tmp_path / "fleet", manifests, limits=WALKING) as fleet,
        KafkaCollector(kfake.bootstrap, topic) as collector,
    ):
        relays = fleet.start_connected(2)
        for round_ in range(4):
            hold_the_log_writer(each_primary)
            written += write(each_primary.url(), 150, asynchronous=True)
            # In even rounds the relays run until the crash. In odd rounds they are suspended before it, keep their
            # state in memory, and resume on another history.
            still = round_ % 2 == 1
            if still:
                for relay in relays:
                    relay.suspend()
            tail = write(each_primary.url(), 200, asynchronous=True)
            each_primary.kill()
            each_primary.launch()
            survived = in_the_table(each_primary.url())
            lost_now = [row for row in written + tail if row.event.event_id not in survived and row not in lost]
            lost += lost_now
            written += tail
            later = write(each_primary.url(), 300)
            written += later
            if still:
                assert_reused(lost_now, later)
                for relay in relays:
                    relay.resume()
            collector.until_all(in_the_table(each_primary.url()), timeout=60)
        collector.until_quiet()

        truth = in_the_table(each_primary.url())
        given_up = {row.event.event_id for row in lost}
        assert not given_up & truth.keys()
        if durability == "Flushed":
            found = check_delivery(truth, given_up, collector.arrivals, kills=4)
        else:
            assert {arrival.event_id for arrival in collector.arrivals} <= truth.keys() | given_up
            found = check_delivery(truth, (), of(truth.keys(), collector.arrivals), kills=4, gapless=False)
        print(f"{found}; {len(lost)} commits were lost")  # noqa: T201 - shown with -s


@pytest.mark.timeout(600)
@pytest.mark.parametrize("relays_hold_still", [False, True], ids=["relays-go-on", "relays-hold-still"])
def test_the_promotion_of_a_lagging_standby(
    relays_hold_still: bool, primary: PostgresServer, kfake: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    topic = kafka_topic(kfake)
    with primary, primary.clone_standby(tmp_path / "standby") as standby:
        url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        manifests = [
            outbox_relay(url),
            subscription("kfake", kafka_sink(kfake.bootstrap, topic), partitions=4),
        ]
        with (
            Fleet(tmp_path / "fleet", manifests, limits=WALKING) as fleet,
            KafkaCollector(kfake.bootstrap, topic) as collector,
        ):
            relays = fleet.start_connected(2)
            early = write(primary.url(), 200)
            collector.until_all([row.event.event_id for row in early])
            if relays_hold_still:
                for relay in relays:
                    relay.suspend()
            unseen = write(primary.url(), 60)
            cut_off(primary, standby)

            tail = write(primary.url(), 300)
            if not relays_hold_still:
                collector.until_all([row.event.event_id for row in tail])
            primary.kill()
            standby.promote()
            survived = in_the_table(standby.url())
            lost = [row for row in tail if row.event.event_id not in survived]
            assert all(row.event.event_id in survived for row in early + unseen)

            later = write(standby.url(), 400)
            assert_reused(lost, later)
            for relay in relays:
                if relays_hold_still:
                    relay.resume()
                relay.until_connected(times=2)
            truth = in_the_table(standby.url())
            collector.until_all(truth, timeout=60)
            collector.until_quiet()

        given_up = {row.event.event_id for row in lost}
        if relays_hold_still:
            assert not of(given_up, collector.arrivals), "published, and never seen"
        assert {arrival.event_id for arrival in collector.arrivals} <= truth.keys() | given_up
        found = check_delivery(truth, (), of(truth.keys(), collector.arrivals), kills=1, gapless=False)
        print(f"{found}; {len(lost)} commits were lost")  # noqa: T201 - shown with -s
