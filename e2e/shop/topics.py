"""Creation of topics, since the brokers of the stories do not create them on first use."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

AUDIT = "audit"
"""The Pub/Sub subscription of the audit; it must exist before the first event."""


def create_kafka_topic(bootstrap: str, name: str, partitions: int, largest_message: int | None) -> None:
    """Create a topic unless it exists, and return when it accepts messages."""
    config = {} if largest_message is None else {"max.message.bytes": str(largest_message)}
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
    try:
        admin.create_topics([topic], operation_timeout=20)[name].result(timeout=30)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def resize_kafka_topic(bootstrap: str, name: str, largest_message: int) -> None:
    """Raise the size limit of a topic, the remedy for messages that are too large."""
    limit = ConfigEntry("max.message.bytes", str(largest_message), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[limit])
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.incremental_alter_configs([resource])[resource].result(timeout=30)


def create_pubsub_topic(project: str, name: str) -> None:
    """Create the topic and the audit's ordered subscription."""
    from google.api_core.exceptions import AlreadyExists  # a slow import, needed only here
    from google.cloud import pubsub_v1

    publisher, subscriber = pubsub_v1.PublisherClient(), pubsub_v1.SubscriberClient()
    topic = publisher.topic_path(project, name)
    try:
        publisher.create_topic(name=topic)
    except AlreadyExists:
        pass
    try:
        subscriber.create_subscription(
            request={
                "name": subscriber.subscription_path(project, f"{name}.{AUDIT}"),
                "topic": topic,
                "enable_message_ordering": True,
                "ack_deadline_seconds": 60,
            }
        )
    except AlreadyExists:
        pass
