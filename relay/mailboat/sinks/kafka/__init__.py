"""Kafka, through librdkafka. The only place that imports ``confluent_kafka``.

``librdkafka_settings``  client settings: those a user may choose, and those the guarantees depend on
``topic``     topic metadata from the brokers: existence, partitions, maximum message size
``kafka_errors``    mapping of librdkafka errors to delivery errors
``proven_partitions``    partitions that have accepted a batch from a producer
``producer_share``      one sink's part of a session
``producer``   one producer from its first message to its first failure, and the sinks that share it
``cluster``   metadata requests and producers shared by sinks with the same connection settings
``kafka_sink``      the sink: one topic, over consecutive sessions
"""

from mailboat.sinks.kafka.kafka_sink import KafkaSink

__all__ = ["KafkaSink"]
