"""Google Cloud Pub/Sub, over its gRPC interface. Apart from the Pub/Sub modules of ``mailboat.consumer.broker``, only
this package imports ``google`` and ``grpc``.

| module | holds |
|---|---|
| ``pubsub_sink`` | the sink: one request in flight per key, within Google's limits |
| ``channel`` | endpoint, credentials, the two gRPC calls and their status codes |
"""

from mailboat.sinks.pubsub.pubsub_sink import PubSubSink

__all__ = ["PubSubSink"]
