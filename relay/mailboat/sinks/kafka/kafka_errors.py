"""Mapping of librdkafka errors: message refused or destination unavailable, with the remedy for the operator."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from confluent_kafka import KafkaError

from mailboat.errors import DeliveryError, EventRefused, SinkUnavailable, Undecided

REFUSING: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
    }
)
"""The broker read the Kafka batch and refused it. The cause may be another message of the same batch."""

_DIFFERENT_RECORD: Final = -138  # RD_KAFKA_RESP_ERR__INVALID_DIFFERENT_RECORD: another record of the batch was refused
COLLATERAL: Final = frozenset(
    {
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._FATAL,
        KafkaError._GAPLESS_GUARANTEE,
        _DIFFERENT_RECORD,
    }
)
"""Not about this message: it was queued behind a failed message or in one batch with it."""

_TOPIC_MISSING: Final = frozenset(
    {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}
)
_NOT_ALLOWED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_TLS_FAILED: Final = frozenset({KafkaError._SSL})
_LOGIN_FAILED: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
_TOO_FEW_REPLICAS: Final = frozenset({KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND})
NETWORK: Final = frozenset(
    {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._TIMED_OUT}
)
_CONNECTION: Final = NETWORK | _LOGIN_FAILED | _TLS_FAILED | {KafkaError.CLUSTER_AUTHORIZATION_FAILED}
"""Not about a topic: everything sent over the same connections fails alike."""
_UNAVAILABLE: Final = {
    _TOPIC_MISSING: "{topic} does not exist on {where}: create it, or correct spec.sink.kafka.topic",
    _NOT_ALLOWED: "{where} does not let this client write to {topic} ({name}): allow Write on the topic (and"
    " IdempotentWrite before Kafka 2.8) to its user",
    _LOGIN_FAILED: "{where} refused the login: {text}; check sasl.* in spec.sink.kafka.config and configSecretRef",
    _TLS_FAILED: "TLS to {where} failed: {text}; check ssl.* and security.protocol",
    _TOO_FEW_REPLICAS: "{topic} on {where} has too few replicas in sync ({name}): bring its brokers back, or lower"
    " min.insync.replicas",
    NETWORK: "{where} can't be reached: {text}; are the brokers up, is spec.sink.kafka.bootstrapServers right?",
}
"""Cause and remedy by error code."""


class RefusedTogether(Undecided):
    """The broker refused the Kafka batch with this message. Sent alone, the message gets a definite result."""


@dataclass(frozen=True, slots=True)
class Report:
    """One delivery report with an error, reduced to the fields used here."""

    code: int
    name: str
    text: str
    topic: str
    partition: int

    @classmethod
    def of(cls, error: KafkaError, topic: str, partition: int) -> Self:
        code, text = error.code(), error.str()
        if code == KafkaError._TRANSPORT and "SSL routines" in text:
            code = KafkaError._SSL  # librdkafka reports OpenSSL errors under either code
        return cls(code, error.name(), text, topic, partition)


def refused(report: Report) -> EventRefused:
    """Return the error for a message that is certainly the refused one."""
    too_large = report.code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)
    return EventRefused(
        f"topic {report.topic} refused it: {report.text} ({report.name})",
        reason="TooLarge" if too_large else "Refused",
        retryable=not too_large,  # a policy may change while the event waits; its size does not
    )


def unavailable(report: Report, bootstrap: str) -> SinkUnavailable:
    other = "{where} can't take events just now: {text} ({name})"
    message = next((message for codes, message in _UNAVAILABLE.items() if report.code in codes), other)
    where, topic = f"Kafka at {bootstrap}", f"topic {report.topic}" if report.topic else "the topic"
    return SinkUnavailable(message.format(where=where, topic=topic, text=report.text, name=report.name))


def more_specific(before: Report | None, now: Report) -> Report | None:
    """Return the client error to keep of two: the one that names a cause, else the later one. A broker that refuses a
    login also closes the connection, which is reported afterwards. "All brokers down" adds nothing to a timeout."""
    if now.code == KafkaError._ALL_BROKERS_DOWN:
        return before
    hides_a_cause = before is not None and before.code not in NETWORK and now.code in NETWORK
    return before if hides_a_cause else now


def no_answer(bootstrap: str, seconds: float, client_error: Report | None) -> SinkUnavailable:
    """Return the error for a timeout. The last client error, if any, is the best available cause."""
    if client_error is not None and client_error.code not in NETWORK:
        return unavailable(client_error, bootstrap)
    hint = "" if client_error is None else f" ({client_error.text})"
    return SinkUnavailable(
        f"no answer from Kafka at {bootstrap} within {seconds:g} s{hint}: are the brokers up, and is "
        "spec.sink.kafka.bootstrapServers right?"
    )


def is_about_a_topic(reports: Iterable[Report]) -> bool:
    """Return whether a report names a fault of a topic or a message, not of the connection."""
    return any(report.code not in COLLATERAL and report.code not in _CONNECTION for report in reports)


class EpochResults:
    """Results for the messages of a failed session, computed once all its delivery reports have arrived."""

    def __init__(self, reports: Sequence[Report], fatal: Report | None, bootstrap: str) -> None:
        """``fatal`` is the client's fatal error, ``reports`` are the delivery reports of all sinks."""
        self._bootstrap = bootstrap
        self._refused = Counter((report.topic, report.partition) for report in reports if report.code in REFUSING)
        self._identified = {(report.topic, report.partition) for report in reports if report.code == _DIFFERENT_RECORD}
        causes = [report for report in reports if report.code in _CONNECTION]
        self.common = next((report for report in (fatal, *causes) if report and report.code not in COLLATERAL), None)
        """Cause that affects all sinks alike."""

    def default_error(self, own: Sequence[Report], otherwise: DeliveryError) -> DeliveryError:
        """Return the error for a sink's messages that are not known to be at fault, including those never handed over:
        by the reports on its ``own`` messages, else ``otherwise``."""
        if any(report.code in REFUSING for report in own):
            return Undecided("a message that was on the way with it was refused")
        cause = next((report for report in own if report.code not in COLLATERAL), self.common)
        return otherwise if cause is None else unavailable(cause, self._bootstrap)

    def error_for(self, report: Report, default: DeliveryError) -> DeliveryError:
        if report.code not in REFUSING:
            return default
        place = (report.topic, report.partition)
        # The broker refuses whole batches, and a batch has one partition: the only message of a batch is at fault.
        if self._refused[place] == 1 or place in self._identified:
            return refused(report)
        return RefusedTogether("the broker refused the Kafka batch that it was in")
