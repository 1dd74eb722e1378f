"""What librdkafka is told: defaults, the user's own settings and secrets, and what nobody may change.

The guarantees of a subscription (order per key, nothing acknowledged that is not replicated, nothing sent after its
answer was given) rest on some settings. Setting those is refused instead of overridden in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

from mailboat.errors import ConfigError
from mailboat.sinks.protocol import SinkContext

Settings = dict[str, Any]

GUARANTEES: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    # A failed batch ends the producer, so that nothing behind it is sent (see session.py for the hole in it).
    "enable.gapless.guarantee": True,
    # The broker's check of sequence numbers keeps order among these.
    "max.in.flight.requests.per.connection": 5,
    # Never: librdkafka would drop one message and still send the next of its key. The sink keeps the time itself.
    "message.timeout.ms": 0,
}
DEFAULTS: Final[Mapping[str, Any]] = {
    "partitioner": "murmur2_random",  # the same partition as a Java producer
    "linger.ms": 0,
    "allow.auto.create.topics": False,
    # How long a topic that nobody knows is waited for. It may have been created a moment ago.
    "topic.metadata.propagation.max.ms": 5_000,
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": 256 * 1024,
    "reconnect.backoff.max.ms": 2_000,
    "socket.keepalive.enable": True,
    "enable.metrics.push": False,
}
MAX_REQUEST_BYTES: Final = 100_000_000
"""A little below the brokers' socket.request.max.bytes: above it they hang up, and nobody learns why."""
_RESERVED: Final[Mapping[str, str]] = {
    "bootstrap.servers": "it has a field of its own, spec.sink.kafka.bootstrapServers",
    "metadata.broker.list": "use spec.sink.kafka.bootstrapServers",
    "acks": "only acks=all keeps events that were answered for",
    "request.required.acks": "only acks=all keeps events that were answered for",
    "enable.idempotence": "order per key rests on it",
    "enable.gapless.guarantee": "order per key rests on it",
    "max.in.flight.requests.per.connection": "order per key rests on it",
    "max.in.flight": "order per key rests on it",
    "queuing.strategy": "order per key rests on it",
    "transactional.id": "Mailboat writes without transactions",
    "message.timeout.ms": "use spec.delivery.timeout",
    "delivery.timeout.ms": "use spec.delivery.timeout",
    "message.send.max.retries": "use spec.delivery",
    "retries": "use spec.delivery",
    "delivery.report.only.error": "every event needs its answer",
    "plugin.library.paths": "it would load foreign code into the relay",
    "ssl.engine.location": "it would load foreign code into the relay",
    "ssl.providers": "it would load foreign code into the relay",
    "logger": "it is not a setting of librdkafka",
    "opaque": "it is not a setting of librdkafka",
}


def client_settings(bootstrap: Iterable[str], config: Mapping[str, str], context: SinkContext) -> Settings:
    """What any client of this sink needs: where to, how to log in, the user's settings. Raises ``ConfigError``."""
    for origin, names in (("spec.sink.kafka.config", config), ("the Secret of configSecretRef", context.secrets)):
        for name in names:
            reason = _RESERVED.get(name)
            if reason is None and name.endswith("_cb"):
                reason = "it is not a setting of librdkafka"
            if reason is not None:
                raise ConfigError(f"{context.subscription}: {origin} must not set {name}: {reason}; remove it")
    return {
        "client.id": "mailboat",  # not the subscription's name: those with the same settings share a producer
        **config,
        **context.secrets,
        "bootstrap.servers": ",".join(bootstrap),
    }


def producer_settings(client: Mapping[str, Any], *, max_message_bytes: int | None) -> Settings:
    """For the producer itself. A batch never grows above what the topic takes, since it would be refused as a whole.

    What the topic takes may not be known (None): what the client itself refuses is given up at once, so it refuses only
    what no broker takes, or what the user said.
    """
    topic_takes = max_message_bytes or MAX_REQUEST_BYTES
    limit = min(topic_takes, int(client.get("message.max.bytes", topic_takes)))
    return {**DEFAULTS, **client, **GUARANTEES, "message.max.bytes": limit}


def check_settings(client: Mapping[str, Any], context: SinkContext) -> None:
    """Let librdkafka itself judge the settings, without a broker. Raises ``ConfigError``, never with a secret in it."""
    settings = producer_settings(client, max_message_bytes=None)
    del settings["bootstrap.servers"]
    try:
        Producer({**settings, "log_level": 0})
    except (KafkaException, ValueError, TypeError) as error:
        raise ConfigError(
            f"{context.subscription}: the Kafka client does not accept its settings: "
            f"{objection(error, context.secrets.values())}; "
            "mend spec.sink.kafka.config or the Secret of configSecretRef"
        ) from None


def objection(error: Exception, secrets: Iterable[str]) -> str:
    """What librdkafka has against its settings, without the secrets among them."""
    cause = error.args[0] if error.args else error
    text = cause.str() if hasattr(cause, "str") else str(cause)
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
