"""Kafka, through librdkafka. Apart from the Kafka modules of ``mailboat.consumer.broker``, only this package imports
``confluent_kafka``.

A *session* is one producer, from its first message to its first failure. Sinks with the same settings share sessions.

| module | holds |
|---|---|
| ``kafka_sink`` | the sink: one topic, over consecutive sessions |
| ``cluster`` | topic metadata and producers, shared by sinks with the same connection settings |
| ``producer`` | one session, and the sinks that share it |
| ``producer_share`` | one sink's part of a session, and the partitions that have accepted a batch |
| ``librdkafka_settings`` | client settings: those a user may choose, and those the guarantees depend on |
| ``kafka_errors`` | mapping of librdkafka errors to delivery errors |
"""

from mailboat.sinks.kafka.kafka_sink import KafkaSink

__all__ = ["KafkaSink"]
