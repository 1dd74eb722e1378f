"""Reads a dead-letter topic on Pub/Sub, for ``mailboat dlq``, from the subscription that has the name of the topic.

Messages are pulled and held. A replay acknowledges the messages that it has published. When the reader closes, the
others are released, so the next command reads them again. If a command is killed, its messages return after the
acknowledgement deadline of the subscription.
"""

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import grpc
from google.pubsub_v1.types import (
    AcknowledgeRequest,
    GetSubscriptionRequest,
    ModifyAckDeadlineRequest,
    PullRequest,
    PullResponse,
    Subscription,
)

from mailboat.consumer.broker.interfaces import Original
from mailboat.errors import SinkUnavailable
from mailboat.sinks.pubsub.channel import PubSubEndpoint, open_channel, unavailable

_TIMEOUT: Final = 30.0
_PULL: Final = 5.0
"""Seconds without a message after which the subscription counts as read."""
_IDS_PER_CALL: Final = 1000
_Pull, _Pulled = PullRequest.pb(), PullResponse.pb()
_Ack, _Modify = AcknowledgeRequest.pb(), ModifyAckDeadlineRequest.pb()
_Get, _Subscription = GetSubscriptionRequest.pb(), Subscription.pb()


class PubSubLetters:
    """All messages that the subscription of a dead-letter topic delivers. See ``replay.Letters``."""

    def __init__(self, destination: PubSubEndpoint, project: str, topic: str) -> None:
        self._destination = destination
        self._topic = topic
        self._subscription = f"projects/{project}/subscriptions/{topic}"
        self._held: dict[str, str] = {}
        """Acknowledgement id by message id, of messages that are not acknowledged."""
        self._seen: set[str] = set()
        self._channel: grpc.aio.Channel | None = None

    async def open(self) -> None:
        """Check that the subscription exists. Raises SinkUnavailable."""
        self._channel = await open_channel(self._destination, "spec.source.pubsub")
        await self.topic_of(self._subscription)

    async def topic_of(self, subscription: str) -> str:
        """Return the path of a subscription's topic."""
        found = await self._call("GetSubscription", _Get(subscription=subscription), _Subscription, subscription)
        return str(found.topic)

    async def next(self, size: int) -> Sequence[Original]:
        """Return the next new messages, ordered by time; an empty list at the end."""
        request = _Pull(subscription=self._subscription, max_messages=size)
        try:
            pulled = await self._call("Pull", request, _Pulled, self._subscription, timeout=_PULL)
        except _NoMessages:
            return []
        received = sorted(pulled.received_messages, key=lambda each: each.message.publish_time.ToNanoseconds())
        new = [each.message for each in received if each.message.message_id not in self._seen]
        for each in received:
            self._held[each.message.message_id] = each.ack_id
            self._seen.add(each.message.message_id)
        return [self._original(message) for message in new]

    async def settle(self, read: Sequence[Original], replayed: Collection[Original]) -> None:
        """Acknowledge the replayed messages."""
        ids = [self._held.pop(str(each.offset)) for each in replayed]
        for chunk in _parts(ids):
            await self._call("Acknowledge", _Ack(subscription=self._subscription, ack_ids=chunk), None, "")

    async def fetch(self, origin: Original) -> Original | None:
        """Return None: a message that was acknowledged can't be read again."""
        return None

    async def close(self) -> None:
        """Release the messages that were not replayed."""
        channel, held, self._held = self._channel, list(self._held.values()), {}
        if channel is None:
            return
        try:
            for chunk in _parts(held):
                request = _Modify(subscription=self._subscription, ack_ids=chunk, ack_deadline_seconds=0)
                await self._call("ModifyAckDeadline", request, None, "")
        except SinkUnavailable:
            pass  # the messages return after their deadline
        finally:
            await channel.close()

    def _original(self, message: Any) -> Original:
        return Original(
            topic=self._subscription,
            partition=None,
            offset=message.message_id,
            timestamp=datetime.fromtimestamp(message.publish_time.ToNanoseconds() / 1e9, UTC),
            key=message.ordering_key.encode() if message.ordering_key else None,
            value=message.data,
            headers=tuple((name, value.encode()) for name, value in message.attributes.items()),
        )

    async def _call(self, method: str, request: Any, response: Any, path: str, *, timeout: float = _TIMEOUT) -> Any:
        assert self._channel is not None, "open() was called"
        call = self._channel.unary_unary(
            f"/google.pubsub.v1.Subscriber/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=None if response is None else response.FromString,
        )
        metadata = (("x-goog-request-params", f"subscription={quote(request.subscription, safe='')}"),)
        try:
            return await call(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if method == "Pull" and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _NoMessages from None
            if error.code() is grpc.StatusCode.NOT_FOUND and path == self._subscription:
                raise SinkUnavailable(
                    f"{path} does not exist on Pub/Sub at {self._destination.host}: create this subscription of topic"
                    f" {self._topic}; Pub/Sub keeps messages for subscriptions only"
                ) from error
            raise unavailable(error, path or self._subscription, self._destination.host, timeout) from error


class _NoMessages(Exception):
    """A pull ended without a message."""


def _parts(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[start : start + _IDS_PER_CALL] for start in range(0, len(ids), _IDS_PER_CALL))
