"""The full path with real relays: kubectl apply, configuration push, assignment of partitions, events on Kafka, lag."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from mailboat import emit
from mailboat_operator.kube.client import CONFIG_MAP, DEPLOYMENT, RELAY, SUBSCRIPTION, Kube, Object
from mailboat_operator.resources.pod import CONFIG_FOLDER, SECRETS_FOLDER
from support.collectors import KafkaCollector
from support.kubelet_volumes import Volume
from support.manifests import DATABASE_SECRET
from support.operator_under_test import Cluster, condition_of, holders, operating, quick, relay, spread, subscription
from support.wait import await_until

PATIENCE = 90.0
"""Seconds. The start of a relay takes a few seconds of CPU time, and longer on a busy machine."""


class RelayProcess:
    """The relay of a pod, started with the arguments of the Deployment. The pod's volumes are in a folder."""

    def __init__(self, deployment: Object, config_map: Object, pod: Object, ip: str, folder: Path, url: str) -> None:
        self.name = pod["metadata"]["name"]
        self.config = Volume(folder / "config")
        self.config.fill(config_map["data"])
        Volume(folder / "secrets" / DATABASE_SECRET).fill({"url": url})
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        stands_for = {
            CONFIG_FOLDER: str(folder / "config"),
            SECRETS_FOLDER: str(folder / "secrets"),
            "$(POD_NAME)": self.name,
            "$(POD_NAMESPACE)": pod["metadata"]["namespace"],
            "$(POD_UID)": pod["metadata"]["uid"],
            "$(POD_IP)": "127.0.0.1",
            "[::]": ip,
        }
        arguments = list(container["args"])
        for placeholder, value in stands_for.items():
            arguments = [argument.replace(placeholder, value) for argument in arguments]
        self.log = folder / "log"
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mailboat.cli.main", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


class Stage:
    """A namespace with real relays."""

    def __init__(self, cluster: Cluster, folder: Path, url: str) -> None:
        self.cluster = cluster
        self.url = url
        self.relays: dict[str, RelayProcess] = {}
        self._folder = folder

    async def start_relay(self, name: str) -> None:
        deployment = await self.cluster.until(DEPLOYMENT, "orders-relay", bool, "the Deployment")
        config_map = await self.cluster.get(CONFIG_MAP, "orders-relay")
        pod = await self.cluster.run_pod(name, answering=False)
        found = {"metadata": {"name": name, "namespace": self.cluster.namespace, "uid": pod.uid}}
        self.relays[name] = RelayProcess(deployment, config_map, found, pod.ip, self._folder / name, self.url)

    async def kubectl(self, *arguments: str, **options: Any) -> str:
        where = ("--namespace", self.cluster.namespace)
        return await asyncio.to_thread(self.cluster.api.kubectl, *arguments, *where, **options)

    async def row(self) -> dict[str, str]:
        """Return the row that `kubectl get eventsubscriptions` prints, by column."""
        header, line = (await self.kubectl("get", "eventsubscriptions")).splitlines()
        starts = [found.start() for found in re.finditer(r"\S+", header)]  # a cell may be empty, so cut by position
        return {
            header[start:end].strip(): line[start:end].strip()
            for start, end in zip(starts, [*starts[1:], None], strict=True)
        }

    async def until_row(self, **expected: str) -> None:
        async def printed() -> Any:
            row = await self.row()
            return all(row[column] == value for column, value in expected.items())

        try:
            await await_until(printed, timeout=PATIENCE, what=f"kubectl to print {expected}")
        except AssertionError as error:
            logs = [relay.log.read_text()[-2000:] for relay in self.relays.values()]
            found = await self.cluster.get(SUBSCRIPTION, "orders-to-kafka")
            raise AssertionError(f"{error}\n{found.get('status')}\n{logs}") from None

    def emit(self, count: int) -> list[str]:
        with psycopg.connect(self.url) as connection:
            return [str(emit(connection, "order.placed", {"n": n}, key=f"k{n % 10}")) for n in range(count)]


@pytest.mark.timeout(600)
async def test_from_kubectl_apply_to_events_on_kafka(api, namespace, tmp_path, database, kfake, kafka_topic):
    topic = kafka_topic(kfake)
    sink = {"kafka": {"bootstrapServers": [kfake.bootstrap], "topic": topic}}
    kube = await Kube.connect(api.kubeconfig)
    cluster = Cluster(api, kube, namespace, tmp_path)
    stage = Stage(cluster, tmp_path, database.url)
    collector = KafkaCollector(kfake.bootstrap, topic)
    try:
        async with operating(cluster, quick(namespace, status_interval=1.0)):
            await stage.kubectl("apply", "--filename", "-", input=yaml.safe_dump(relay(wake={"pollInterval": "50ms"})))
            for name in ("orders-relay-a", "orders-relay-b"):
                await stage.start_relay(name)
            await cluster.until_condition(RELAY, "orders", "Ready", "True", timeout=PATIENCE)

            # The relays receive the subscription by push only: their mounted volumes are never updated.
            await stage.kubectl("apply", "--filename", "-", input=yaml.safe_dump(subscription(sink=sink)))
            await stage.until_row(READY="True", STATUS="Delivering", LAG="0", SINK="kafka", PARTITIONS="4")
            found = await cluster.until(SUBSCRIPTION, "orders-to-kafka", spread(2, 2), "a share for both", PATIENCE)
            assert set(holders(found).values()) == {"orders-relay-a", "orders-relay-b"}

            with collector:
                written = await asyncio.to_thread(stage.emit, 100)
                await asyncio.to_thread(collector.until_all, written, PATIENCE)

                paused = {"spec": {"state": "Paused"}}
                await cluster.patch(SUBSCRIPTION, "orders-to-kafka", paused)
                await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Paused", "True", timeout=PATIENCE)
                waiting = await asyncio.to_thread(stage.emit, 50)
                await stage.until_row(READY="True", STATUS="PausedBySpec", LAG="50")
                await cluster.patch(SUBSCRIPTION, "orders-to-kafka", {"spec": {"state": "Running"}})
                await asyncio.to_thread(collector.until_all, waiting, PATIENCE)
                await stage.until_row(READY="True", STATUS="Delivering", LAG="0")

                stage.relays["orders-relay-b"].kill()
                await cluster.remove_pod("orders-relay-b")
                late = await asyncio.to_thread(stage.emit, 50)
                await asyncio.to_thread(collector.until_all, late, PATIENCE)
                found = await cluster.until(
                    SUBSCRIPTION,
                    "orders-to-kafka",
                    lambda found: set(holders(found).values()) == {"orders-relay-a"},
                    "the other relay to hold everything",
                    timeout=PATIENCE,
                )
            found = await cluster.until_condition(SUBSCRIPTION, "orders-to-kafka", "Ready", "True", timeout=PATIENCE)
            assert condition_of(found, "SinkReachable")["status"] == "True"
    finally:
        for each in stage.relays.values():
            each.kill()
        await cluster.close()
        await kube.close()
