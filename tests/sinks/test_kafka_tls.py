"""Kafka with TLS and SASL: settings from the manifest, credentials from the Secret, and no credentials in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import yaml
from confluent_kafka.admin import AdminClient

from mailboat.consumer.broker.decode import decode
from mailboat.consumer.broker.kafka_client import consumer_settings
from mailboat.consumer.broker.kafka_source import KafkaSource
from mailboat.consumer.received_event import Event
from mailboat.errors import SinkUnavailable
from mailboat.sinks.kafka import KafkaSink
from mailboat_devservers.kafka import KafkaServer, SecureListener, start_apache_kafka
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres import Database
from support.broker_parts import NAME, running
from support.certificate_authority import Authority
from support.cli import RunningRelay
from support.kubelet_volumes import Volume
from support.manifests import event_subscription, outbox_relay_on
from support.sink_backends import KafkaBackend, context, message
from support.wait import await_until, wait_until

USER, PASSWORD, WRONG = "mailboat", "correct-horse-battery", "hunter2-hunter2"
MECHANISMS = ["PLAIN", "SCRAM-SHA-512"]

pytestmark = pytest.mark.timeout(600)


class Secured(KafkaBackend):
    """A topic on a broker with a TLS and SASL listener. The test reads it by the plain listener."""

    def __init__(self, server: KafkaServer, listener: SecureListener, authority: Authority) -> None:
        super().__init__(server, partitions=1)
        self.listener = listener
        self.authority = authority

    def spec(self, **config: str) -> dict[str, Any]:
        """``spec.sink.kafka``, without credentials."""
        settings = {"security.protocol": "SASL_SSL", "ssl.ca.pem": self.authority.certificate}
        dotted = {name.replace("_", "."): value for name, value in config.items()}
        return {"bootstrapServers": [self.listener.bootstrap], "topic": self.topic, "config": settings | dotted}

    def secured_sink(self, password: str = PASSWORD, timeout: float = 5.0, **config: str) -> KafkaSink:
        spec = self.spec(**config)
        model = SimpleNamespace(bootstrap_servers=spec["bootstrapServers"], topic=self.topic, config=spec["config"])
        return KafkaSink.build(model, context(timeout, secret(password)))


def secret(password: str) -> dict[str, str]:
    return {"sasl.username": USER, "sasl.password": password}


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority("the brokers' authority")


@pytest.fixture(scope="session")
def broker(
    tmp_path_factory: pytest.TempPathFactory, or_skip: Callable[..., KafkaServer], authority: Authority
) -> Iterator[tuple[KafkaServer, SecureListener]]:
    place = tmp_path_factory.mktemp("secured-kafka")
    keystore = place / "keystore.pem"
    keystore.write_text(authority.keystore())
    listener = SecureListener(free_port(), keystore, USER, PASSWORD)
    with or_skip(lambda: start_apache_kafka(place, secure=listener)) as server:
        for mechanism in MECHANISMS:
            _log_in(listener, authority, mechanism)
        yield server, listener


def _log_in(listener: SecureListener, authority: Authority, mechanism: str) -> None:
    """Log in once, since the first login takes a JVM longer than the time-outs of the tests."""
    login = {"sasl.mechanism": mechanism, **secret(PASSWORD)}
    tls = {"security.protocol": "SASL_SSL", "ssl.ca.pem": authority.certificate}
    client = AdminClient({"bootstrap.servers": listener.bootstrap, "log_level": 0, **tls, **login})
    assert client.list_topics(timeout=60).brokers


@pytest.fixture
def kafka(broker: tuple[KafkaServer, SecureListener], authority: Authority) -> Iterator[Secured]:
    backend = Secured(*broker, authority)
    yield backend
    backend.close()


async def open_errors(sink: KafkaSink, pattern: str) -> list[str]:
    """Open the sink until an error matches the pattern, and return all errors.

    On a busy machine the client may time out before that error.
    """
    errors: list[str] = []

    async def found() -> bool:
        with pytest.raises(SinkUnavailable) as error:
            await sink.open()
        errors.append(str(error.value))
        return re.search(pattern, errors[-1]) is not None

    try:
        await await_until(found, what=f"{pattern!r} in {errors}")
    finally:
        await sink.close()
    return errors


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_with_the_right_password_events_arrive(kafka: Secured, mechanism: str) -> None:
    sink = kafka.secured_sink(timeout=20, sasl_mechanism=mechanism)
    try:
        await sink.open()
        assert await sink.publish([message(number) for number in range(3)]) == {}
    finally:
        await sink.close()
    assert [item.value for item in await kafka.receive(3)] == [b"0", b"1", b"2"]


async def test_a_consumer_logs_in_with_the_same_settings(kafka: Secured, unique_name: Callable[[str], str]) -> None:
    handled: list[bytes | None] = []

    async def handle(event: Event) -> None:
        handled.append(event.payload)

    def source(password: str) -> KafkaSource:
        spec = kafka.spec(sasl_mechanism="SCRAM-SHA-512")
        settings = consumer_settings(
            spec["bootstrapServers"], spec["config"], secret(password), subscription=NAME, group=unique_name("group")
        )
        return KafkaSource(settings, kafka.topic, decode, consumer=NAME)

    sink = kafka.secured_sink(timeout=20, sasl_mechanism="PLAIN")
    await sink.open()
    assert await sink.publish([message(number) for number in range(3)]) == {}
    await sink.close()
    async with running(handle, pattern="*", source=source(PASSWORD)):
        await await_until(lambda: len(handled) == 3, what="three events")
    assert sorted(each or b"" for each in handled) == [b"0", b"1", b"2"]
    async with running(handle, pattern="*", source=source(WRONG)) as it:
        error = await await_until(lambda: it.source.state().error, what="a refused login")
    assert "refused the login" in error
    assert WRONG not in error


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_a_wrong_password_makes_the_sink_unavailable_and_is_not_printed(
    kafka: Secured, mechanism: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = kafka.secured_sink(WRONG, sasl_mechanism=mechanism)
    errors = await open_errors(sink, r"refused the login: .*check sasl\.\*")
    printed = capfd.readouterr()
    assert WRONG not in "".join(errors) + caplog.text + printed.out + printed.err


async def test_a_broker_with_a_certificate_of_an_unknown_ca_is_refused(kafka: Secured) -> None:
    sink = kafka.secured_sink(sasl_mechanism="PLAIN", ssl_ca_pem=Authority("another authority").certificate)
    await open_errors(sink, r"^TLS to Kafka at .* failed: .*check ssl\.\* and security\.protocol")


async def test_a_client_without_tls_is_refused(kafka: Secured) -> None:
    sink = kafka.secured_sink(timeout=2, security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN")
    try:
        with pytest.raises(SinkUnavailable) as error:
            await sink.open()
    finally:
        await sink.close()
    assert PASSWORD not in str(error.value)


def test_a_relay_reloads_a_corrected_password_and_has_counted_no_attempt(
    kafka: Secured, outbox: Database, tmp_path: Path
) -> None:
    sink = kafka.spec(sasl_mechanism="SCRAM-SHA-512") | {"configSecretRef": {"name": "kafka-login"}}
    subscription = event_subscription("to-kafka", {"kafka": sink}, partitions=1, delivery={"timeout": "5s"})
    (tmp_path / "manifests.yaml").write_text(yaml.safe_dump_all([outbox_relay_on(outbox.url), subscription]))
    login = Volume(tmp_path / "secrets" / "kafka-login")
    login.fill(secret(WRONG))
    log = tmp_path / "relay.log"
    arguments = ["-f", str(tmp_path / "manifests.yaml"), "--secrets-dir", str(tmp_path / "secrets")]
    relay = RunningRelay(arguments, log)
    try:
        relay.wait_ready()
        with psycopg.connect(outbox.url) as connection:
            connection.execute("select mailboat.emit('order.placed', '1'::bytea, key => 'k')")

        def status() -> dict[str, Any]:
            (found,) = json.loads(relay.get("/status")[1])["relays"][0]["subscriptions"]
            return dict(found)

        wait_until(lambda: "refused the login" in (status()["lastError"] or ""), 60, "the refused login in the status")
        assert (status()["sinkReachable"], status()["refused"], status()["parked"]) == (False, 0, 0)
        login.fill(secret(PASSWORD))
        wait_until(lambda: status()["published"] == 1, 60, "the event to be delivered")
        assert outbox.execute("select count(*) from mailboat.parked") == [(0,)]
        everything = log.read_text() + relay.get("/status")[1] + relay.get("/metrics")[1]
        assert not [word for word in (WRONG, PASSWORD) if word in everything]
        assert relay.stop() == 0
    finally:
        if relay.process.poll() is None:
            relay.process.kill()
            relay.process.wait(timeout=10)
