"""Kafka, through librdkafka. The only place that imports ``confluent_kafka``.

``settings``  what the client is told: what a user may choose, and what the guarantees rest on
``topic``     what the brokers say about topics: do they exist, how large may a message be
``errors``    what librdkafka's errors mean for the messages they hit
``warmth``    which partitions have accepted something from a producer
``lane``      one sink's part of a session
``session``   one producer from its first message to its first failure, and the sinks that share it
``cluster``   what sinks with the same connection settings share
``sink``      the sink: one topic, in one session after the other
"""

from mailboat.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
