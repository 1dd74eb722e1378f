"""Google Cloud Pub/Sub, over its gRPC interface. Apart from the Pub/Sub modules of ``mailboat.consumer.broker``, only
this package imports ``google`` and ``grpc``.

| module | holds |
|---|---|
| ``pubsub_sink`` | the sink: one request in flight per key |
| ``channel`` | endpoint, credentials, and the two gRPC calls |
| ``limits`` | Google's limits for a message and a request |
| ``pubsub_errors`` | mapping of gRPC status codes to delivery errors |
"""

from mailboat.sinks.pubsub.pubsub_sink import PubSubSink

__all__ = ["PubSubSink"]
