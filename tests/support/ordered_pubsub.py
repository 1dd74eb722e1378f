"""Pub/Sub service for one subscription that redelivers like Google's service. Google's own fake does not.

The fake of the development servers sends one message of an ordering key and waits for its acknowledgement. The service
sends many. After a nack or an expired lease the service sends that message again and all later ones of the key,
including acknowledged ones, to the same stream or to another one. Messages in flight are not recalled.

The fake in this module accepts deadlines below ten seconds, which the service refuses, so that tests need not wait.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.pubsub_v1.types import (
    AcknowledgeRequest,
    GetSubscriptionRequest,
    ModifyAckDeadlineRequest,
    PubsubMessage,
    StreamingPullRequest,
    StreamingPullResponse,
    Subscription,
)
from google.rpc import code_pb2, error_details_pb2, status_pb2

PATH = "projects/acme/subscriptions/orders"
_Message, _Response, _Subscription = PubsubMessage.pb(), StreamingPullResponse.pb(), Subscription.pb()
_Get = GetSubscriptionRequest.pb()
_Pull, _Acknowledge, _Modify = StreamingPullRequest.pb(), AcknowledgeRequest.pb(), ModifyAckDeadlineRequest.pb()


@dataclass(eq=False)
class _Stored:
    message: Any
    acknowledged: bool = False
    deliveries: int = 0
    lease: _Lease | None = None


@dataclass(eq=False)
class _Lease:
    stored: _Stored
    ack_id: str
    stream: _Stream
    until: float


@dataclass(eq=False)
class _Stream:
    window: int
    deadline: float
    outgoing: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    outstanding: int = 0


@dataclass
class _Key:
    log: list[_Stored] = field(default_factory=list)
    next: int = 0
    stream: _Stream | None = None
    not_before: float = 0.0


class OrderedPubSub(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Fake of the service.

    ``nacks`` counts nacks, ``expired`` counts expired leases, ``redelivered`` counts messages that were sent again.
    """

    def __init__(self, *, exactly_once: bool = False, seed: int = 1) -> None:
        self.exactly_once = exactly_once
        self.nacks = self.expired = self.redelivered = 0
        self.failed_acks = 0
        self.retry_delay = 0.0
        """Seconds between a nack and the redelivery: the retry policy of the subscription."""
        self.fail_acks: grpc.StatusCode | None = None
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._keys: dict[str, _Key] = defaultdict(_Key)
        self._leases: dict[str, _Lease] = {}
        self._streams: list[_Stream] = []
        self._ids = itertools.count(1)
        self._workers = ThreadPoolExecutor(max_workers=32)
        self._closed = threading.Event()
        self._server = grpc.server(self._workers, handlers=(self,))
        self.host = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._clock = threading.Thread(target=self._expire, name="ordered-pubsub", daemon=True)
        self._clock.start()

    # ---- for tests -------------------------------------------------------------------------------------------------

    def publish(self, key: str, data: bytes, **attributes: str) -> str:
        with self._lock:
            number = next(self._ids)
            message = _Message(data=data, attributes=attributes, message_id=str(number), ordering_key=key)
            message.publish_time.GetCurrentTime()
            # Messages without a key have no order, so each has its own log.
            self._keys[key or f"\0{number}"].log.append(_Stored(message))
            self._send()
            return str(number)

    @property
    def unacknowledged(self) -> list[str]:
        with self._lock:
            return [
                stored.message.message_id
                for key in self._keys.values()
                for stored in key.log
                if not stored.acknowledged
            ]

    @property
    def leased(self) -> int:
        with self._lock:
            return len(self._leases)

    @property
    def streams(self) -> int:
        return len(self._streams)

    def expire_leases(self) -> None:
        """Expire all leases now, as after an outage that is longer than the leases."""
        with self._lock:
            for lease in self._leases.values():
                lease.until = 0

    def end_streams(self) -> None:
        """End all streams, as the service does from time to time."""
        with self._lock:
            for stream in list(self._streams):
                self._leave(stream)

    def close(self) -> None:
        self._closed.set()
        self.end_streams()
        self._server.stop(grace=0.1).wait()
        self._clock.join()
        self._workers.shutdown()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "StreamingPull":
            return grpc.stream_stream_rpc_method_handler(
                self._pull, _Pull.FromString, lambda response: response.SerializeToString()
            )
        handle, request = {
            "Acknowledge": (self._acknowledge, _Acknowledge),
            "ModifyAckDeadline": (self._modify, _Modify),
            "GetSubscription": (self._get, _Get),
        }[method]
        return grpc.unary_unary_rpc_method_handler(handle, request.FromString)

    def _get(self, request: Any, context: Any) -> bytes:
        subscription = _Subscription(name=PATH, enable_message_ordering=True)
        subscription.retry_policy.minimum_backoff.seconds = 10
        return subscription.SerializeToString()  # type: ignore[no-any-return]

    def _pull(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        first = next(requests)
        stream = _Stream(first.max_outstanding_messages or 10**9, first.stream_ack_deadline_seconds)

        def heartbeats() -> None:
            try:
                for _ in requests:
                    pass
            except grpc.RpcError:
                pass
            self._leave(stream)

        threading.Thread(target=heartbeats, daemon=True).start()
        context.add_callback(lambda: self._leave(stream))
        with self._lock:
            self._streams.append(stream)
            self._send()
        while (response := stream.outgoing.get()) is not None:
            yield response
        self._leave(stream)

    def _leave(self, stream: _Stream) -> None:
        """Remove an ended stream. Its leases stay until they expire."""
        with self._lock:
            if stream in self._streams:
                self._streams.remove(stream)
                stream.outgoing.put(None)
                for key in self._keys.values():
                    if key.stream is stream and not self._held(key, stream):
                        key.stream = None
                self._send()

    def _acknowledge(self, request: Any, context: Any) -> bytes:
        if self.fail_acks is not None:
            self.failed_acks += 1
            context.abort(self.fail_acks, "as the test wants")
        with self._lock:
            invalid = [ack_id for ack_id in request.ack_ids if ack_id not in self._leases]
            for ack_id in request.ack_ids:
                lease = self._leases.pop(ack_id, None)
                if lease is not None:
                    lease.stored.acknowledged = True
                    self._end(lease)
            self._send()
        return self._answer(invalid, context)

    def _modify(self, request: Any, context: Any) -> bytes:
        with self._lock:
            invalid = [ack_id for ack_id in request.ack_ids if ack_id not in self._leases]
            for ack_id in request.ack_ids:
                lease = self._leases.get(ack_id)
                if lease is not None and request.ack_deadline_seconds:
                    lease.until = time.monotonic() + request.ack_deadline_seconds
                elif lease is not None:
                    self.nacks += 1
                    self._rewind(lease).not_before = time.monotonic() + self.retry_delay
            self._send()
        return self._answer(invalid, context)

    def _answer(self, invalid: list[str], context: Any) -> bytes:
        if self.exactly_once and invalid:
            info = error_details_pb2.ErrorInfo(metadata=dict.fromkeys(invalid, "PERMANENT_FAILURE_INVALID_ACK_ID"))
            detail = AnyMessage()
            detail.Pack(info)
            status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="expired", details=[detail])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expired")
        return b""

    # ---- deliveries ------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        now = time.monotonic()
        for key in self._keys.values():
            while key.next < len(key.log) and key.not_before <= now:
                if key.stream is None or key.stream not in self._streams:
                    if key.stream is not None and self._held(key, key.stream):
                        break  # until the leases of the ended stream expire
                    if not self._streams:
                        return
                    key.stream = self._random.choice(self._streams)
                stream = key.stream
                if stream.outstanding >= stream.window:
                    break
                self._deliver(key.log[key.next], stream)
                key.next += 1

    def _deliver(self, stored: _Stored, stream: _Stream) -> None:
        ack_id = f"{stored.message.message_id}:{next(self._ids)}"
        stored.lease = self._leases[ack_id] = _Lease(stored, ack_id, stream, time.monotonic() + stream.deadline)
        stored.acknowledged = False
        stored.deliveries += 1
        self.redelivered += stored.deliveries > 1
        stream.outstanding += 1
        response = _Response()
        response.received_messages.add(ack_id=ack_id, message=stored.message)
        response.subscription_properties.exactly_once_delivery_enabled = self.exactly_once
        response.subscription_properties.message_ordering_enabled = True
        stream.outgoing.put(response)

    def _rewind(self, lease: _Lease) -> _Key:
        """Send this message again, and all later ones of its key."""
        ordering_key = lease.stored.message.ordering_key or f"\0{lease.stored.message.message_id}"
        key = self._keys[ordering_key]
        index = key.log.index(lease.stored)
        for stored in key.log[index : key.next]:
            stored.acknowledged = False
            if stored.lease is not None:
                self._leases.pop(stored.lease.ack_id, None)
                self._end(stored.lease)
        key.next = min(key.next, index)
        if not any(stored.lease for stored in key.log[:index]):
            key.stream = None
        return key

    def _end(self, lease: _Lease) -> None:
        lease.stored.lease = None
        lease.stream.outstanding -= 1

    def _held(self, key: _Key, stream: _Stream) -> bool:
        return any(stored.lease is not None and stored.lease.stream is stream for stored in key.log)

    def _expire(self) -> None:
        while not self._closed.wait(0.05):
            with self._lock:
                now = time.monotonic()
                for lease in list(self._leases.values()):
                    if lease.until < now and lease.ack_id in self._leases:
                        self.expired += 1
                        self._rewind(lease)
                self._send()
