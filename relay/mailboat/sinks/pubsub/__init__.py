"""Google Cloud Pub/Sub, over its gRPC interface. Beside the stream of the Pub/Sub source, the only place that imports
``google`` and ``grpc``.

``limits``      Google's limits for a message and a request
``connection``  endpoint, credentials, and the two gRPC calls
``errors``      mapping of gRPC status codes to delivery errors
``sink``        the sink: one request in flight per key
"""

from mailboat.sinks.pubsub.sink import PubSubSink

__all__ = ["PubSubSink"]
