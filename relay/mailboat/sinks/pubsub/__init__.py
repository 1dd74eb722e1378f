"""Google Cloud Pub/Sub, over its gRPC interface. Beside the stream of the Pub/Sub source, the only place that imports
``google`` and ``grpc``.

``limits``      Google's limits for a message and a request
``channel``  endpoint, credentials, and the two gRPC calls
``pubsub_errors``      mapping of gRPC status codes to delivery errors
``pubsub_sink``        the sink: one request in flight per key
"""

from mailboat.sinks.pubsub.pubsub_sink import PubSubSink

__all__ = ["PubSubSink"]
