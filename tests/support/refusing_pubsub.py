"""gRPC proxy in front of Google's fake that refuses chosen messages, like the real service and unlike the fake.

The proxy forwards every call as bytes, and answers requests that contain ``poison`` with ``answer``, by default
INVALID_ARGUMENT.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.pubsub_v1.types import PublishRequest


def _same(data: bytes) -> bytes:
    return data


class RefusingPubSub(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, target: str) -> None:
        self.poison: bytes | None = None
        self.answer = grpc.StatusCode.INVALID_ARGUMENT
        self.published: list[int] = []
        """Number of messages in each publish request."""
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(target, options=unlimited)
        self._workers = ThreadPoolExecutor(max_workers=16)
        self._server = grpc.server(self._workers, handlers=(self,), options=unlimited)
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def service(self, details: Any) -> Any:
        passed_on = self._channel.unary_unary(details.method, _same, _same)

        def handle(request: bytes, context: Any) -> bytes:
            if self.poison is not None and self.poison in request:
                context.abort(self.answer, "a message of this request is poison")
            if details.method.endswith("/Publish"):
                self.published.append(len(PublishRequest.deserialize(request).messages))
            try:
                answer: bytes = passed_on(request, timeout=60)
                return answer
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
                raise

        return grpc.unary_unary_rpc_method_handler(handle, _same, _same)

    def close(self) -> None:
        self._server.stop(grace=None).wait()
        self._workers.shutdown()
        self._channel.close()
