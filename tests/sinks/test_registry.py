"""Sinks are built by entry points, with an error message for each failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mailboat.errors import NoSuchSink
from mailboat.runtime.subscription_set import reason_for
from mailboat.sinks.kafka import KafkaSink
from mailboat.sinks.log import LogSink
from mailboat.sinks.pubsub import PubSubSink
from mailboat.sinks.registry import build_sink
from mailboat.testing.memory_sink import MemorySink
from mailboat_spec import Reason
from mailboat_spec import Sink as SinkSpec
from support.sink_backends import context


def spec(**sink: object) -> SinkSpec:
    return SinkSpec.model_validate(sink)


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that registers a few sinks."""
    info = tmp_path / "acme_sinks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-sinks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mailboat.sinks]\n"
        "acme = mailboat.testing.memory_sink:MemorySink\n"
        "acme-broken = mailboat.testing.memory_sink:NoSuchClass\n"
        "acme-needy = acme_module_that_is_not_there:Sink\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_built_in_sinks_are_found() -> None:
    kafka = spec(kafka={"bootstrapServers": ["127.0.0.1:9092"], "topic": "orders"})

    assert isinstance(build_sink(kafka, context()), KafkaSink)
    assert isinstance(build_sink(spec(pubsub={"project": "acme-shop", "topic": "orders"}), context()), PubSubSink)
    assert isinstance(build_sink(spec(log={}), context()), LogSink)


@pytest.mark.usefixtures("third_party")
def test_a_third_party_sink_gets_its_config() -> None:
    sink = build_sink(spec(custom={"type": "acme", "config": {"max_value_bytes": 7}}), context())

    assert isinstance(sink, MemorySink)
    assert sink.max_value_bytes == 7


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("type_", "error"),
    [
        ("acme2", r'no installed package offers a sink "acme2" \(there are: .*acme.*kafka'),
        ("acme-broken", "can't be loaded: .*NoSuchClass"),
        ("acme-needy", "needs the module acme_module_that_is_not_there, which is not installed"),
    ],
)
def test_a_missing_or_broken_third_party_sink_is_explained(type_: str, error: str) -> None:
    with pytest.raises(NoSuchSink, match=r"^shop/orders: spec\.sink\.custom\.type: .*" + error) as missing:
        build_sink(spec(custom={"type": type_}), context())

    assert reason_for(missing.value) is Reason.SINK_NOT_SUPPORTED


def test_a_missing_client_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("mailboat.sinks.kafka")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)

    with pytest.raises(NoSuchSink, match=r"pip install 'mailboat\[kafka\]'"):
        build_sink(spec(kafka={"bootstrapServers": ["127.0.0.1:9092"], "topic": "orders"}), context())
