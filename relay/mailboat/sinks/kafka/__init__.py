"""Kafka, through librdkafka. The only place that imports ``confluent_kafka``.

``settings``  what the client is told: what a user may choose, and what the guarantees rest on
``topic``     what the brokers say about the topic: does it exist, how large may a message be
``errors``    what librdkafka's errors mean for the messages they hit
``session``   one producer from its first message to its first failure
``sink``      the sink: one session after the other
"""

from mailboat.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
