"""Kafka, through librdkafka. Apart from the Kafka modules of ``mailboat.consumer.broker``, only this package imports
``confluent_kafka``.

A *session* is one producer, from its first message to its first failure. Sinks with the same settings share sessions.
"""

from mailboat.sinks.kafka.kafka_sink import KafkaSink

__all__ = ["KafkaSink"]
