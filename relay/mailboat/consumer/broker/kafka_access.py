"""Access of a consumer to its broker, topic and group: the errors of the client, and their messages for a user.

The client reconnects by itself and reports errors, but it does not report that a broker or a topic is available again.
While one is unavailable, a metadata request is made with back-off.
"""

import logging
import time
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException

from mailboat.consumer.broker.availability import Availability
from mailboat.sinks.kafka.kafka_errors import NETWORK, Report, more_specific

log = logging.getLogger(__name__)

_NO_TOPIC: Final = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)


class KafkaAccess:
    """Errors of one source's clients. Only the thread that owns the client calls its methods."""

    def __init__(self, bootstrap: str, topic: str, group: str, consumer: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._group = group
        self._availability = Availability("Kafka", log, consumer)
        self._reported: Report | None = None
        """Most telling error since the last check."""
        self._cause: Report | None = None
        """Error behind the current outage."""
        self._next_request = 0.0

    @property
    def error(self) -> str | None:
        """Why the broker is unavailable; None if it is available."""
        return self._availability.error

    def succeeded(self) -> None:
        self._availability.succeeded()

    def failed(self, message: str) -> float:
        """Begin or continue an outage, and return the seconds until the next try."""
        return self._availability.failed(message)

    def on_error(self, error: KafkaError) -> None:
        """Callback of the client, called while it polls. Raises a fatal error."""
        self._reported = more_specific(self._reported, Report.of(error, self._topic, -1))
        if error.fatal():
            raise KafkaException(error)

    def fail(self, error: KafkaError) -> None:
        """Begin an outage because of an error. Raises a fatal error."""
        if error.fatal():
            raise KafkaException(error)
        if error.code() != KafkaError._PARTITION_EOF:
            self._note(Report.of(error, self._topic, -1))

    def check(self, client: Consumer) -> None:
        """Process the reported errors. Without one, find out whether an outage is over."""
        if self._reported is not None:
            report, self._reported = self._reported, None
            self._note(report)
        elif self.error is not None:
            self._request_metadata(client)

    def _note(self, report: Report) -> None:
        self._cause = report
        message = describe(report, self._bootstrap, self._topic, self._group)
        self._next_request = time.monotonic() + self.failed(message)

    def _request_metadata(self, client: Consumer) -> None:
        """Request the metadata of the topic. Other causes, such as a refused group, end with an assignment."""
        cause = self._cause
        if time.monotonic() < self._next_request or cause is None or cause.code not in NETWORK | _NO_TOPIC:
            return
        try:
            found = client.list_topics(self._topic, timeout=1.0).topics[self._topic]
            if found.error is None:
                self.succeeded()
            else:
                self._note(Report.of(found.error, self._topic, -1))
        except KafkaException as error:
            self._note(Report.of(error.args[0], self._topic, -1))


def describe(report: Report, bootstrap: str, topic: str, group: str) -> str:
    """Return the message for a user: the cause and the remedy."""
    where = f"Kafka at {bootstrap}"
    match report.code:
        case code if code in _NO_TOPIC:
            return f"topic {topic} does not exist on {where}: create it, or correct spec.source.kafka.topic"
        case KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return f"{where} does not let this client read topic {topic}: allow Read on the topic to its user"
        case KafkaError.GROUP_AUTHORIZATION_FAILED:
            return f"{where} does not let this client use group {group}: allow Read on the group to its user"
        case KafkaError._AUTHENTICATION | KafkaError.SASL_AUTHENTICATION_FAILED:
            return f"{where} refused the login: {report.text}; check sasl.* in config and configSecretRef of the source"
        case KafkaError._SSL:
            return f"TLS to {where} failed: {report.text}; check ssl.* and security.protocol"
        case code if code in NETWORK:
            return (
                f"{where} can't be reached: {report.text}; are the brokers up, is spec.source.kafka.bootstrapServers"
                " right?"
            )
        case KafkaError.UNSUPPORTED_VERSION | KafkaError._UNSUPPORTED_FEATURE:
            return f"{where} does not support a request of this consumer: {report.text} ({report.name})"
        case _:
            return f"{where}: {report.text} ({report.name})"
