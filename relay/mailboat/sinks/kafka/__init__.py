"""Kafka, through librdkafka. The only place that imports ``confluent_kafka``.

``settings``  client settings: those a user may choose, and those the guarantees depend on
``topic``     topic metadata from the brokers: existence, partitions, maximum message size
``errors``    mapping of librdkafka errors to delivery errors
``warmth``    partitions that have accepted a batch from a producer
``lane``      one sink's part of a session
``session``   one producer from its first message to its first failure, and the sinks that share it
``cluster``   metadata requests and producers shared by sinks with the same connection settings
``sink``      the sink: one topic, over consecutive sessions
"""

from mailboat.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
