"""Google Cloud Pub/Sub, over its gRPC interface. Apart from the Pub/Sub modules of ``mailboat.consumer.broker``, only
this package imports ``google`` and ``grpc``.
"""

from mailboat.sinks.pubsub.pubsub_sink import PubSubSink

__all__ = ["PubSubSink"]
