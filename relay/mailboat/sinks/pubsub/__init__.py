"""Google Cloud Pub/Sub, over its gRPC interface. The only place that imports ``google`` and ``grpc``.

``limits``      what Google takes in a message and in a request
``connection``  where the service is, who we are there, and the one call that is made
``errors``      what its status codes mean
``sink``        the sink: one request on the way per key
"""

from mailboat.sinks.pubsub.sink import PubSubSink

__all__ = ["PubSubSink"]
