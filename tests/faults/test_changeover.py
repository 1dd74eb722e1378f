"""A new configuration while a sink does not answer: only the subscription of that sink waits."""

from __future__ import annotations

import pytest

from mailboat.runtime.config_source import Configuration
from mailboat_devservers.postgres import Database
from mailboat_spec import read_documents
from support.inprocess_relay import STAGED, StagedSink, events, serving, status_of, write
from support.ledger import check_delivery
from support.manifests import Manifest
from support.relay_processes import outbox_relay, subscription
from support.wait import await_until

Stage = dict[str, StagedSink]


def _configuration(outbox: Database, *subscriptions: Manifest) -> Configuration:
    documents = read_documents([("manifest", each) for each in (outbox_relay(outbox.url), *subscriptions)])
    return Configuration(documents.relays[0], tuple(documents.subscriptions))


@pytest.mark.parametrize(
    "change",
    [{}, {"start": {"from": "Position", "position": 1}}, {"partitions": 3}, None],
    ids=["as it was", "changed", "laid out anew", "deleted"],
)
async def test_other_subscriptions_continue_while_one_waits_for_its_sink(
    outbox: Database, stage: Stage, change: Manifest | None
) -> None:
    patient = {"timeout": "60s"}
    slow = subscription("slow", STAGED, partitions=2, delivery=patient)
    quick, new = subscription("quick", STAGED, partitions=2), subscription("new", STAGED)
    changed = (
        [] if change is None else [subscription("slow", STAGED, **{"partitions": 2, "delivery": patient, **change})]
    )
    async with serving(outbox_relay(outbox.url), slow, quick, timings=None, follows=True) as relay:
        await await_until(lambda: len(stage) == 2 and len(status_of(relay, "slow").owned) == 2, what="partitions")
        stage["slow"].hold_answers()
        first = write(outbox.url, events(1, 1))
        await await_until(lambda: stage["slow"].publishes and stage["quick"].arrived, what="a batch that is on its way")

        quick["spec"]["delivery"]["batchSize"] = 3
        relay.reconfigure(_configuration(outbox, *changed, quick, new))
        second = write(outbox.url, events(1, 1, first=2))
        await await_until(lambda: "new" in stage and len(stage["new"].arrived) == 2, what="the new subscription")
        await await_until(lambda: len(stage["quick"].arrived) == 2, what="the other one")
        assert (stage["slow"].publishes, stage["slow"].arrived) == (1, []), "its batch is on its way still"

        stage["slow"].let_go()
        wanted = first | second if changed else first
        await await_until(lambda: len(stage["slow"].arrived) == len(wanted), what="what the slow one was to get")
        if changed:
            partitions = changed[0]["spec"]["partitions"]
            await await_until(lambda: len(status_of(relay, "slow").owned) == partitions, what="its partitions")
    for name, written in (("quick", first | second), ("new", first | second), ("slow", wanted)):
        check_delivery(written, (), stage[name].arrivals)
