"""librdkafka settings: defaults, the user's settings and secrets, and fixed values.

The guarantees of a subscription (order per key, no acknowledgement before replication, nothing sent after its result
was returned) depend on some settings. Setting those is refused instead of silently overridden. Settings that run
commands or read files are refused as well. ``mailboat_spec.resources.kafka_settings`` lists the allowed settings.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

from mailboat.errors import ConfigError
from mailboat.sinks.protocol import SinkContext
from mailboat_spec.resources import kafka_settings

Settings = dict[str, Any]

GUARANTEES: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    # A failed batch ends the producer, so that nothing behind it is sent (``ProvenPartitions`` has the exception).
    "enable.gapless.guarantee": True,
    # The broker's check of sequence numbers keeps order among these.
    "max.in.flight.requests.per.connection": 5,
    # No timeout: librdkafka would drop one message and still send the next of its key. The sink keeps the deadline.
    "message.timeout.ms": 0,
}
DEFAULTS: Final[Mapping[str, Any]] = {
    "partitioner": "murmur2_random",  # the same partition as a Java producer
    "linger.ms": 0,
    "allow.auto.create.topics": False,
    # How long to wait for an unknown topic, which may have just been created.
    "topic.metadata.propagation.max.ms": 5_000,
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": 256 * 1024,
    "reconnect.backoff.max.ms": 2_000,
    "socket.keepalive.enable": True,
    "enable.metrics.push": False,
}
MAX_REQUEST_BYTES: Final = 100_000_000
"""A little below the brokers' socket.request.max.bytes. Above it a broker closes the connection without an error."""

_SMALLEST_LIMIT: Final = 1000
"""The least that librdkafka accepts for message.max.bytes. A topic with a smaller limit refuses messages itself."""


def client_settings(
    bootstrap: Iterable[str],
    config: Mapping[str, str],
    context: SinkContext,
    allowed: frozenset[str] = kafka_settings.ALLOWED,
) -> Settings:
    """Return the settings of any client of this sink: addresses, login, user's settings. Raises ``ConfigError``."""
    for origin, names in (("spec.sink.kafka.config", config), ("the Secret of configSecretRef", context.secrets)):
        for name in names:
            if (why := kafka_settings.refusal_reason(name, allowed)) is not None:
                raise ConfigError(f"{context.subscription}: {origin}: {name} {why}")
    return {
        "client.id": "mailboat",  # not the subscription's name: sinks with the same settings share a producer
        **config,
        **context.secrets,
        "bootstrap.servers": ",".join(bootstrap),
    }


def producer_settings(client: Mapping[str, Any], *, max_message_bytes: int | None) -> Settings:
    """Return the settings of the producer. A batch never exceeds the topic's limit: it would be refused as a whole.

    If the topic's limit is unknown (None), the client refuses only messages that no broker accepts or that exceed the
    user's own limit, because a message that the client refuses is given up at once.
    """
    topic_takes = max_message_bytes or MAX_REQUEST_BYTES
    limit = max(_SMALLEST_LIMIT, min(topic_takes, int(client.get("message.max.bytes", topic_takes))))
    return {**DEFAULTS, **client, **GUARANTEES, "message.max.bytes": limit}


def check_settings(client: Mapping[str, Any], context: SinkContext) -> None:
    """Check the settings with librdkafka, without a broker. Raises ``ConfigError``, which never contains a secret."""
    settings = producer_settings(client, max_message_bytes=None)
    del settings["bootstrap.servers"]
    try:
        Producer({**settings, "log_level": 0})
    except (KafkaException, ValueError, TypeError) as error:
        raise ConfigError(
            f"{context.subscription}: the Kafka client does not accept its settings: "
            f"{masked_error(error, context.secrets.values())}; "
            "correct spec.sink.kafka.config or the Secret of configSecretRef"
        ) from None


def masked_error(error: Exception, secrets: Iterable[str]) -> str:
    """Return librdkafka's error about its settings, with secrets masked."""
    cause = error.args[0] if error.args else error
    text = cause.str() if hasattr(cause, "str") else str(cause)
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
