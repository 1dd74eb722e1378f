"""Allow-list of the librdkafka settings that a subscription may set, in its manifest or in its Secret.

An allow-list, because librdkafka has more than 150 settings and every release adds some. The right to write an
EventSubscription must not include the right to run commands in the relay's pod (``sasl.kerberos.kinit.cmd``), to load
code into it (``plugin.library.paths``), to read its files (settings that end in ``location`` or ``file``) or to weaken
order and delivery (``acks``, ``enable.idempotence``). Certificates and keys are given as PEM instead of as files.
"""

from collections.abc import Mapping
from typing import Final

from mailboat_spec.validation_errors import nearest

ALLOWED: Final = frozenset(
    [
        "client.id", "client.dns.lookup", "client.rack", "broker.address.family", "broker.address.ttl",
        "security.protocol",
        "sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password", "sasl.oauthbearer.method",
        "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret", "sasl.oauthbearer.scope",
        "sasl.oauthbearer.extensions", "sasl.oauthbearer.token.endpoint.url",
        "ssl.ca.pem", "ssl.certificate.pem", "ssl.key.pem", "ssl.key.password", "ssl.cipher.suites", "ssl.curves.list",
        "ssl.sigalgs.list", "ssl.endpoint.identification.algorithm", "enable.ssl.certificate.verification",
        "socket.timeout.ms", "socket.connection.setup.timeout.ms", "socket.keepalive.enable", "socket.nagle.disable",
        "socket.max.fails", "socket.send.buffer.bytes", "socket.receive.buffer.bytes", "connections.max.idle.ms",
        "reconnect.backoff.ms", "reconnect.backoff.max.ms", "retry.backoff.ms", "retry.backoff.max.ms",
        "request.timeout.ms", "metadata.max.age.ms", "metadata.recovery.strategy",
        "metadata.recovery.rebootstrap.trigger.ms",
        "topic.metadata.refresh.interval.ms", "topic.metadata.refresh.fast.interval.ms",
        "topic.metadata.refresh.sparse", "topic.metadata.propagation.max.ms", "allow.auto.create.topics",
        "linger.ms", "queue.buffering.max.ms", "queue.buffering.max.messages", "queue.buffering.max.kbytes",
        "batch.size", "batch.num.messages", "message.max.bytes", "message.copy.max.bytes", "receive.message.max.bytes",
        "compression.type", "compression.codec", "compression.level", "partitioner", "sticky.partitioning.linger.ms",
        "debug", "log_level", "log.connection.close", "enable.metrics.push",
    ]
)  # fmt: skip

CONSUMER_ONLY: Final = frozenset(
    [
        "fetch.min.bytes", "fetch.max.bytes", "fetch.wait.max.ms", "fetch.error.backoff.ms",
        "max.partition.fetch.bytes", "fetch.message.max.bytes", "check.crcs", "session.timeout.ms",
        "heartbeat.interval.ms",
    ]
)  # fmt: skip
"""Allowed in a source beside the settings above, which configure its consumer and the producer of dead letters."""
SOURCE_ALLOWED: Final = ALLOWED | CONSUMER_ONLY

_INSTEAD: Final[Mapping[str, str]] = {
    "bootstrap.servers": "it has a field of its own, bootstrapServers",
    "metadata.broker.list": "use bootstrapServers",
    "group.id": "it has a field of its own, spec.source.kafka.group",
    "group.protocol": "use spec.source.kafka.groupProtocol",
    "partition.assignment.strategy": "use spec.source.kafka.groupProtocol",
    "auto.offset.reset": "use spec.start.from",
    "enable.auto.commit": "offsets are committed after their events are handled",
    "enable.auto.offset.store": "offsets are committed after their events are handled",
    "isolation.level": "events of aborted transactions are never handled",
    "max.poll.interval.ms": "the duration of handlers is not limited by it",
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
    "ssl.ca.location": "it reads a file; give the certificates as ssl.ca.pem",
    "ssl.certificate.location": "it reads a file; give the certificate as ssl.certificate.pem",
    "ssl.key.location": "it reads a file; give the key as ssl.key.pem",
}

NOT_ALLOWED: Final = "is none of the librdkafka settings that a subscription may set (docs/destinations.md lists them)"
"""Message for any other setting, appended to its name."""


def refusal_reason(name: str, allowed: frozenset[str] = ALLOWED) -> str | None:
    """Return why a setting is refused, with the remedy; None if it is allowed."""
    if name in allowed:
        return None
    if (instead := _INSTEAD.get(name)) is not None:
        return f"{NOT_ALLOWED}: {instead}"
    meant = nearest(name, allowed)
    return f"{NOT_ALLOWED}; did you mean {meant}?" if meant else f"{NOT_ALLOWED}: remove it"
