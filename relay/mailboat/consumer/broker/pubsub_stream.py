"""The gRPC calls of a Pub/Sub consumer: the stream of messages, their leases, acknowledgements and nacks.

Google's subscriber client is not used, because it can't keep the order of a key or say that the service is unavailable.
In google-cloud-pubsub 2.x:

- a nack hands the next message of the key to the callback before the nacked one is redelivered, and so does a lease
  that is older than ``max_lease_duration`` or expired (``Dispatcher.drop`` activates the key);
- shutdown nacks messages on hold, but not those that wait behind another message of their key;
- messages that wait in the client are not visible and do not count against its flow control;
- the stream is reopened without a message, without a limit, and failed acknowledgements are dropped silently.

All calls run in one thread with an event loop of its own. A handler that blocks the application's event loop thus stops
neither the renewal of leases nor the heartbeats of the stream.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import quote
from uuid import uuid4

import grpc
from google.pubsub_v1.types import (
    AcknowledgeRequest,
    GetSubscriptionRequest,
    ModifyAckDeadlineRequest,
    StreamingPullRequest,
    StreamingPullResponse,
    Subscription,
)

from mailboat.consumer.broker.pubsub_acks import IDS_PER_REQUEST, AckQueue, CallResult, result_of
from mailboat.consumer.broker.pubsub_keys import Bounds
from mailboat.errors import ConfigError, MailboatError, SinkUnavailable
from mailboat.sinks.daemon_thread import in_a_thread
from mailboat.sinks.pubsub.channel import PubSubEndpoint, open_channel

_CALL_TIMEOUT: Final = 10.0
_HEARTBEAT: Final = 30.0
_FIRST_BACKOFF: Final = 0.1
_LONGEST_BACKOFF: Final = 5.0
_STABLE: Final = 2.0
"""Seconds after which an open stream counts as available, also if no message arrives."""
_LAST_MESSAGES: Final = 1.0
"""Seconds that a closing stream waits for messages that are on their way."""
_LAST_CALLS: Final = 5.0
"""Seconds that ``close`` waits for acknowledgements and nacks."""

# Plain protobuf classes, because the wrappers exported by the types module are slow.
_Acknowledge: Final = AcknowledgeRequest.pb()
_ModifyAckDeadline: Final = ModifyAckDeadlineRequest.pb()
_GetSubscription: Final = GetSubscriptionRequest.pb()
_Subscription: Final = Subscription.pb()
_PullRequest: Final = StreamingPullRequest.pb()
_PullResponse: Final = StreamingPullResponse.pb()


class Delivery(NamedTuple):
    """A message as it arrived. ``message`` is a plain protobuf ``PubsubMessage``."""

    ack_id: str
    message: Any


class ServiceUnavailable(MailboatError):
    """Pub/Sub can't be reached, or refuses the call at the moment."""


class PullStream:
    """One consumer's connection. Methods may be called from the event loop that created the object.

    The service stops sending while as many messages as ``bounds`` allows are not settled. ``deliver`` and ``report``
    are called in the event loop that created the object. ``report`` gets why the service is unavailable, once per
    outage, and None when it is available again.
    """

    def __init__(
        self,
        destination: PubSubEndpoint,
        subscription: str,
        bounds: Bounds,
        lease: int,
        deliver: Callable[[list[Delivery]], None],
        report: Callable[[str | None], None],
    ) -> None:
        self._destination = destination
        self._subscription = subscription
        self._bounds = bounds
        self._lease = lease
        self._deliver = deliver
        self._report = report
        self._caller = asyncio.get_running_loop()
        self._metadata = (("x-goog-request-params", f"subscription={quote(subscription, safe='')}"),)
        self._client_id = str(uuid4())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mailboat-pubsub", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._reader: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._leases: dict[str, None] = {}
        self._acks = AckQueue(self._acknowledge)
        self._nacks = AckQueue(self._nack)
        self._modify_lock = asyncio.Lock()
        self._call: Any = None
        self._closing = False
        self._unavailable: str | None = None

    # ---- called in the application's event loop --------------------------------------------------------------------

    async def open(self) -> Any:
        """Connect, and return the subscription, or None if this identity may not read its settings.

        Raises ConfigError if the subscription does not exist, and ServiceUnavailable.
        """
        if not self._thread.is_alive():
            self._thread.start()
        return await self._in_thread(self._get_subscription())

    async def start(self) -> None:
        """Begin to receive. Reconnects until it is stopped."""
        await self._in_thread(self._start())

    def ack(self, ack_ids: list[str]) -> None:
        """Acknowledge, with retries. An acknowledgement that fails for good means a redelivery."""
        self._schedule(self._acks.add, ack_ids, None)

    def nack(self, ack_ids: list[str], confirmed: Callable[[], None] | None = None) -> None:
        """Give messages back. ``confirmed`` is called after the service has received the nack of the first one."""
        self._schedule(self._queue_nacks, ack_ids, confirmed)

    def forget(self, ack_id: str) -> None:
        """Stop renewing the lease of this delivery: the message was delivered again, with another ack id."""
        self._schedule(self._leases.pop, ack_id, None)

    async def stop_reading(self) -> None:
        """Stop receiving. Messages in flight are delivered before this method returns."""
        if self._thread.is_alive():
            await self._in_thread(self._stop_reading())

    async def close(self) -> None:
        """Send the remaining acknowledgements and nacks, and disconnect."""
        if self._thread.is_alive():
            await self._in_thread(self._close())
            self._schedule(self._loop.stop)
            await in_a_thread(self._thread.join, "pubsub-join")
        if not self._loop.is_closed():
            self._loop.close()

    def _schedule(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed: the leases run out
            self._loop.call_soon_threadsafe(function, *arguments)

    def _in_thread(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _schedule_in_caller(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the application's loop is closed
            self._caller.call_soon_threadsafe(function, *arguments)

    async def _get_subscription(self) -> Any:
        try:
            if self._channel is None:
                self._channel = await open_channel(self._destination, "spec.source.pubsub")
            call = self._unary("GetSubscription", _GetSubscription, _Subscription)
            return await call(
                _GetSubscription(subscription=self._subscription), timeout=_CALL_TIMEOUT, metadata=self._metadata
            )
        except SinkUnavailable as error:  # no credentials
            raise ServiceUnavailable(str(error)) from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:  # a subscriber need not have subscriptions.get
                return None
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise ConfigError(self._describe(error)) from error
            raise ServiceUnavailable(self._describe(error)) from error

    async def _start(self) -> None:
        self._reader = asyncio.create_task(self._read())
        tasks = (self._renew(), self._acks.run(), self._nacks.run())
        self._tasks = [self._reader, *map(asyncio.create_task, tasks)]

    async def _read(self) -> None:
        backoff = _FIRST_BACKOFF
        failures = 0
        while not self._closing:
            opened, reason = time.monotonic(), ""
            try:
                await self._read_stream()
            except grpc.aio.AioRpcError as error:
                reason = self._describe(error)
            except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                reason = f"the stream ended: {error}"
            if self._closing:
                return
            stable = time.monotonic() - opened > _STABLE
            failures = 0 if stable else failures + 1
            backoff = _FIRST_BACKOFF if stable else min(2 * backoff, _LONGEST_BACKOFF)
            if failures > 1:  # the service ends each stream now and then
                self._set_unavailable(
                    reason or f"Pub/Sub at {self._destination.host} ended the stream of {self._subscription}"
                )
            await asyncio.sleep(backoff)

    async def _read_stream(self) -> None:
        assert self._channel is not None
        call = self._channel.stream_stream(
            "/google.pubsub.v1.Subscriber/StreamingPull",
            request_serializer=_PullRequest.SerializeToString,
            response_deserializer=_PullResponse.FromString,
        )(metadata=self._metadata)
        self._call = call
        beat = asyncio.create_task(self._beat(call))
        try:
            await call.write(
                _PullRequest(
                    subscription=self._subscription,
                    client_id=self._client_id,
                    stream_ack_deadline_seconds=self._lease,
                    max_outstanding_messages=self._bounds.max_messages,
                    max_outstanding_bytes=self._bounds.max_bytes,
                )
            )
            while (response := await call.read()) is not grpc.aio.EOF:
                self._set_unavailable(None)
                deliveries = [Delivery(item.ack_id, item.message) for item in response.received_messages]
                self._leases.update((delivery.ack_id, None) for delivery in deliveries)
                if deliveries:
                    self._schedule_in_caller(self._deliver, deliveries)
        finally:
            beat.cancel()
            call.cancel()

    async def _beat(self, call: Any) -> None:
        await asyncio.sleep(_STABLE)
        self._set_unavailable(None)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while True:
                await asyncio.sleep(_HEARTBEAT)
                await call.write(_PullRequest())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            ids = list(self._leases)
            for first in range(0, len(ids), IDS_PER_REQUEST):
                async with self._modify_lock:  # a renewal that arrives after a nack would take it back
                    leased = [ack_id for ack_id in ids[first : first + IDS_PER_REQUEST] if ack_id in self._leases]
                    result = await self._modify(leased, self._lease) if leased else CallResult()
                for ack_id in result.failed:
                    self._leases.pop(ack_id, None)

    async def _acknowledge(self, ack_ids: list[str]) -> CallResult:
        call = self._unary("Acknowledge", _Acknowledge, None)
        result = await self._send(call, _Acknowledge(subscription=self._subscription, ack_ids=ack_ids), ack_ids)
        for ack_id in {*ack_ids} - {*result.retry}:
            self._leases.pop(ack_id, None)
        return result

    def _queue_nacks(self, ack_ids: list[str], confirmed: Callable[[], None] | None) -> None:
        for ack_id in ack_ids:
            self._leases.pop(ack_id, None)
        self._nacks.add(ack_ids[:1], None if confirmed is None else partial(self._schedule_in_caller, confirmed))
        self._nacks.add(ack_ids[1:], None)

    async def _nack(self, ack_ids: list[str]) -> CallResult:
        async with self._modify_lock:
            return await self._modify(ack_ids, 0)

    async def _modify(self, ack_ids: list[str], seconds: int) -> CallResult:
        call = self._unary("ModifyAckDeadline", _ModifyAckDeadline, None)
        request = _ModifyAckDeadline(subscription=self._subscription, ack_ids=ack_ids, ack_deadline_seconds=seconds)
        return await self._send(call, request, ack_ids)

    async def _send(self, call: Any, request: Any, ack_ids: list[str]) -> CallResult:
        try:
            await call(request, timeout=_CALL_TIMEOUT, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return result_of(error, ack_ids)
        except grpc.aio.UsageError:  # the channel was closed
            return CallResult(retry=ack_ids)
        return CallResult()

    async def _stop_reading(self) -> None:
        self._closing = True
        if self._reader is None:
            return
        if self._call is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                await asyncio.wait_for(self._call.done_writing(), _LAST_MESSAGES)
        await asyncio.wait([self._reader], timeout=_LAST_MESSAGES)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _close(self) -> None:
        await self._stop_reading()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(self._acks.empty(), self._nacks.empty()), _LAST_CALLS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    # ---- words -----------------------------------------------------------------------------------------------------

    def _set_unavailable(self, reason: str | None) -> None:
        if (reason is None) != (self._unavailable is None):
            self._schedule_in_caller(self._report, reason)
        self._unavailable = reason

    def _unary(self, method: str, request: Any, response: Any) -> Any:
        assert self._channel is not None
        return self._channel.unary_unary(
            f"/google.pubsub.v1.Subscriber/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=None if response is None else response.FromString,
        )

    def _describe(self, error: grpc.aio.AioRpcError) -> str:
        code, details, where = error.code(), error.details() or "", f"Pub/Sub at {self._destination.host}"
        if code is grpc.StatusCode.NOT_FOUND:
            return (
                f"{self._subscription} does not exist on {where}: create it with message ordering enabled and without "
                "a dead-letter topic, or correct spec.source.pubsub.project and subscription"
            )
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return (
                f"{where} does not let this identity consume {self._subscription}: grant it roles/pubsub.subscriber "
                f"({details})"
            )
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return (
                f"{where} does not accept the credentials: check credentialsSecretRef or the workload identity "
                f"({details})"
            )
        return f"{where} is unavailable: {details} ({code.name})"
