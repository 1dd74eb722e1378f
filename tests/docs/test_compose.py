"""examples/compose/compose.yaml matches the code: images, commands, files and topics. No container engine is used."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Context

from mailboat.cli.main import main
from mailboat.runtime.manifest_files import load
from mailboat.runtime.secrets import Secrets, database_url

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_services_wait_only_for_services_and_for_checks_that_exist() -> None:
    for name, service in SERVICES.items():
        for other, wanted in service.get("depends_on", {}).items():
            assert wanted["condition"] != "service_healthy" or "healthcheck" in SERVICES[other], (
                f"{name} waits for {other}"
            )


def test_kafka_is_the_version_that_the_tests_run_against() -> None:
    broker = (ROOT / "devservers" / "mailboat_devservers" / "kafka-broker.xml").read_text(encoding="utf-8")
    tested = set(re.findall(r"<version>(\d+\.\d+\.\d+)</version>", broker))
    used = {service["image"].partition(":")[2] for service in SERVICES.values() if "kafka" in service.get("image", "")}
    assert used <= tested


def test_the_images_of_mailboat_are_built_from_a_dockerfile_here() -> None:
    for name in ("relay", "producer", "consumer"):
        build = SERVICES[name]["build"]
        assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
        for volume in SERVICES[name]["volumes"]:
            assert (FOLDER / volume.partition(":")[0]).is_file()


def test_its_commands_are_commands_of_mailboat() -> None:
    (loop,) = SERVICES["producer"]["command"]
    emit = shlex.split(loop.partition("mailboat ")[2].splitlines()[0])
    for name, *arguments in (SERVICES["relay"]["command"], SERVICES["consumer"]["command"], emit):
        command = main.get_command(Context(main), name)
        assert command is not None
        command.make_context(name, [*arguments, "-f", str(FOLDER / "mailboat.yaml")])


def test_database_and_topics_are_those_of_the_manifests() -> None:
    manifests = load([FOLDER / "mailboat.yaml"])
    environment = SERVICES["relay"]["environment"]
    assert environment["MAILBOAT_MANIFESTS"] == SERVICES["relay"]["volumes"][0].split(":")[1]
    url = database_url(manifests.relays[0], Secrets(None, environment))
    postgres = SERVICES["postgres"]["environment"]
    assert url.endswith(f":{postgres['POSTGRES_PASSWORD']}@postgres:5432/{postgres['POSTGRES_DB']}")
    subscription, view = manifests.subscriptions
    created = set(re.findall(r"for topic in ([-\w. ]+);", SERVICES["topics"]["command"][0])[0].split())
    assert subscription.spec.sink.kafka is not None
    assert created == {subscription.spec.sink.kafka.topic, subscription.dead_letter_topic, view.dead_letter_topic}
    assert subscription.spec.sink.kafka.bootstrap_servers == ("kafka:9092",)


def test_the_producer_emits_events_of_the_consumers_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    consumer = importlib.import_module("consumer")
    (loop,) = SERVICES["producer"]["command"]
    _, event_type, payload, *_ = shlex.split(loop.partition("mailboat ")[2].splitlines()[0])
    assert event_type == "order.placed"
    assert [field.name for field in fields(consumer.Order)] == list(json.loads(payload.replace("$$order", "1")))
    sys.modules.pop("consumer")


def test_published_ports_are_those_that_the_commands_listen_on() -> None:
    for name in ("relay", "consumer"):
        (published,) = SERVICES[name]["ports"]
        command = SERVICES[name]["command"]
        assert published.rpartition(":")[2] == command[command.index("--listen") + 1].rpartition(":")[2]
