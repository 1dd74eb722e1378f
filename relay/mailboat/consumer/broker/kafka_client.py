"""Settings of the Kafka consumer client.

Login, TLS and the allow-list of settings are those of the Kafka sink. The settings that delivery depends on are fixed
here.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException

from mailboat.errors import ConfigError
from mailboat.sinks.kafka.librdkafka_settings import client_settings, masked_error
from mailboat.sinks.protocol import SinkContext
from mailboat_spec.resources.kafka_settings import SOURCE_ALLOWED

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
"""Group protocol of KIP-848, for brokers from 4.0."""

_DEFAULTS: Final[Mapping[str, Any]] = {
    "reconnect.backoff.max.ms": 2_000,
    "socket.keepalive.enable": True,
    "topic.metadata.refresh.interval.ms": 10_000,  # how soon new partitions, or a topic made late, are found
    "allow.auto.create.topics": False,
    "enable.metrics.push": False,
}
_FIXED: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    # With a small prefetch, the default of 1000 makes the client wait a second after each full queue.
    "fetch.queue.backoff.ms": 10,
    "queued.max.messages.kbytes": 16 * 1024,
}
_CLASSIC: Final[Mapping[str, Any]] = {"partition.assignment.strategy": "cooperative-sticky"}
_DROPPED_LOGS: Final = ("FAIL [", "ERROR [", "GETPWUID")
"""Logged per connection attempt. The source reports the cause once."""


def _is_relevant(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(dropped in text for dropped in _DROPPED_LOGS)


client_log: Final = logging.getLogger(f"{__name__}.librdkafka")
client_log.addFilter(_is_relevant)


def consumer_settings(
    bootstrap: Iterable[str],
    config: Mapping[str, str],
    secrets: Mapping[str, str],
    *,
    subscription: str,
    group: str,
    group_protocol: str = CLASSIC,
    start: str = "earliest",
    prefetch: int = 2_000,
) -> dict[str, Any]:
    """Return the settings of the client. Raises ``ConfigError``, which never contains a secret.

    ``start``: ``earliest`` or ``latest``, where a group without committed offsets begins.
    """
    context = SinkContext(subscription=subscription, delivery_timeout=0, secrets=secrets)
    try:
        client = client_settings(bootstrap, config, context, SOURCE_ALLOWED)
    except ConfigError as error:
        raise ConfigError(str(error).replace("spec.sink.kafka", "spec.source.kafka")) from None
    settings = {
        **_DEFAULTS,
        **client,
        **_FIXED,
        "group.id": group,
        "group.protocol": group_protocol,
        "auto.offset.reset": start,
        "queued.min.messages": prefetch,
        **(_CLASSIC if group_protocol == CLASSIC else {}),
    }
    checked = {name: value for name, value in settings.items() if name != "bootstrap.servers"}
    try:
        Consumer({**checked, "log_level": 0}).close()
    except (KafkaException, ValueError, TypeError) as error:
        raise ConfigError(
            f"{subscription}: the Kafka client does not accept its settings: {masked_error(error, secrets.values())};"
            " correct spec.source.kafka.config or the Secret of configSecretRef"
        ) from None
    return settings
