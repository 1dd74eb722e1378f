"""The example of a consumer behind Kafka runs as it stands, with the addresses of servers here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from confluent_kafka import Producer

from mailboat_harbor.kafka import KafkaServer
from mailboat_harbor.redis_server import RedisServer
from support.wait import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "billing"


def test_orders_are_charged_once_and_it_drains(
    kfake: KafkaServer, valkey: RedisServer, kafka_topic: Callable[[KafkaServer], str], tmp_path: Path
) -> None:
    orders = kafka_topic(kfake)
    kfake.create_topic(f"{orders}.billing.dead", 1)
    manifest = (EXAMPLE / "billing.yaml").read_text().replace("kafka:9092", kfake.bootstrap).replace("orders", orders)
    (tmp_path / "billing.yaml").write_text(manifest)
    shutil.copy(EXAMPLE / "billing.py", tmp_path)
    ids = [str(uuid4()) for _ in range(3)]
    producer = Producer({"bootstrap.servers": kfake.bootstrap})
    for event_id, total in zip(ids, ("12.50", "-1", "7"), strict=True):
        headers = {"ce_specversion": "1.0", "ce_id": event_id, "ce_type": "order.placed", "ce_source": "shop"}
        value = json.dumps({"order": "o-1", "total": total}).encode()
        producer.produce(orders, value, b"o-1", headers=[*headers.items()])
    assert producer.flush(30) == 0
    command = [sys.executable, "-m", "mailboat.cli.main", "consume", "-f", "billing.yaml", "billing:billing"]
    with (tmp_path / "charged").open("wb") as out, (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "MAILBOAT_SECRET_REDIS_URL": valkey.url}
        consumer = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=log, env=environment)
        try:
            wait_until(lambda: (tmp_path / "charged").read_text().count("\n") == 2, timeout=60, what="two charges")
            consumer.send_signal(signal.SIGTERM)
            assert consumer.wait(30) == 0, (tmp_path / "log").read_text()
        finally:
            consumer.kill()
            consumer.wait()
    charged = re.findall(r"charged (\S+) for o-1, idempotency key (\S+)", (tmp_path / "charged").read_text())
    assert charged == [("12.50", ids[0]), ("7", ids[2])]
