"""docs/operations.md: the procedures for on-call engineers have the described effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mailboat_devservers.postgres import Database
from support.cli import Place, RunningRelay, relay_manifest, subscription_manifest
from support.markdown import blocks
from support.wait import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def arrived(file: Path) -> list[dict[str, Any]]:
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""  # the last line may be incomplete
    return [json.loads(line) for line in whole.splitlines()]


def until_arrived(file: Path, *ids: str) -> list[dict[str, Any]]:
    def came() -> bool:
        return [each["event_id"] for each in arrived(file)] == list(ids)

    wait_until(came, timeout=60, what=f"{len(ids)} events in {file.name}")
    return arrived(file)


def test_events_delivered_since_a_time_are_sent_again_with_the_same_ids(database: Database, tmp_path: Path) -> None:
    folder = tmp_path / "manifests"
    folder.mkdir()
    place = Place(folder, database)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    plain = subscription_manifest(partitions=1, sink={"log": {"path": str(first)}})
    place.write(relay_manifest(database.url), plain)
    place.ok("migrate")
    relay = RunningRelay(["-f", str(folder), "--relay-id", "first"], tmp_path / "first.log")
    try:
        relay.wait_ready()
        before = place.ok("emit", "order.placed", "{}", "--key", "k").strip()
        until_arrived(first, before)
        ((since,),) = database.execute("select to_json(clock_timestamp())::text")
        wanted = [place.ok("emit", "order.paid", str(number), "--key", "k").strip() for number in range(3)]
        other = place.ok("emit", "invoice.sent", "{}", "--key", "k").strip()
        delivered = until_arrived(first, before, *wanted, other)
    finally:
        assert relay.stop() == 0
    again = next(yaml.safe_load(block) for block in blocks(PAGE, "yaml"))
    assert again["spec"]["start"].keys() == {"from", "time"}
    again["spec"]["start"]["time"] = json.loads(since)
    again["spec"] |= {"sink": {"log": {"path": str(second)}}, "partitions": 1}
    place.write(relay_manifest(database.url), plain, again)
    relay = RunningRelay(["-f", str(folder), "--relay-id", "second"], tmp_path / "second.log")
    try:
        relay.wait_ready()
        resent = until_arrived(second, *wanted)
        new = place.ok("emit", "order.paid", "{}", "--key", "k").strip()
        until_arrived(second, *wanted, new)
        assert len(until_arrived(first, before, *wanted, other, new)) == 6, "the first one did not notice"
    finally:
        assert relay.stop() == 0
    assert [each["value"] for each in resent] == [each["value"] for each in delivered[1:4]]
    assert {each["headers"]["ce_time"] for each in resent} == {each["headers"]["ce_time"] for each in delivered[1:4]}
    place.write(relay_manifest(database.url), plain)
    assert place.ok("forget", "shop/orders-again", "--yes") == "shop/orders-again is forgotten\n"
