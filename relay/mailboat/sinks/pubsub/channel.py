"""Endpoint and credentials of Pub/Sub, the two gRPC calls, and the meaning of their status codes.

Google's publisher client has its own batches, threads and retries and does not report which message failed. With
ordering keys it is also slow: 560 messages/s where this module reaches 10,000 (4,000 messages over 400 keys against
Google's own fake). So the sink uses gRPC directly, with Google's message types and credentials.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self
from urllib.parse import quote

import google.auth
import google.auth.exceptions
import grpc
from google.pubsub_v1.services.publisher.transports import PublisherGrpcAsyncIOTransport
from google.pubsub_v1.types import GetTopicRequest, PublishRequest, PublishResponse, PubsubMessage, Topic

from mailboat.errors import ConfigError, SinkUnavailable
from mailboat.model import Message
from mailboat.sinks.daemon_thread import in_a_thread

_GLOBAL_HOST: Final = "pubsub.googleapis.com:443"
_SCOPES: Final = ("https://www.googleapis.com/auth/pubsub",)
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
# Plain protobuf classes, because the wrappers exported by the types module cost more than the request itself.
_Message: Final = PubsubMessage.pb()
_PublishRequest: Final = PublishRequest.pb()
_GetTopicRequest: Final = GetTopicRequest.pb()

REFUSING: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})
"""The service read the request and refused it. A request fails as a whole, whichever of its messages is at fault."""
_UNAVAILABLE: Final = {
    grpc.StatusCode.NOT_FOUND: "{topic} does not exist on {where}: create it, or correct spec.sink.pubsub.project and"
    " topic",
    grpc.StatusCode.PERMISSION_DENIED: "{where} does not let this identity publish to {topic}: grant it"
    " roles/pubsub.publisher ({details})",
    grpc.StatusCode.UNAUTHENTICATED: "{where} does not accept the credentials: check credentialsSecretRef or the"
    " workload identity ({details})",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "{where} says that a quota is used up: {details}; raise it, or wait",
    # About project and topic, not about the message.
    grpc.StatusCode.FAILED_PRECONDITION: "{where} takes nothing for {topic} as things are: {details}; check the"
    " project's billing, the key that the topic is encrypted with, and whether its storage policy allows the region of"
    " this relay",
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer from {where} within {seconds:g} s; is it up, and may the relay reach"
    " it?",
    grpc.StatusCode.UNAVAILABLE: "{where} can't be reached: {details}; is it up, and may the relay reach it?",
}
"""Cause and remedy by status code."""


@dataclass(frozen=True, slots=True)
class PubSubEndpoint:
    """A host and its security. Any host other than Google's, without a key, is an emulator: no TLS, no credentials."""

    host: str
    plain: bool
    key_file: Mapping[str, Any] | None = None
    """Key of a service account; None to use the credentials of the environment."""

    @classmethod
    def choose(cls, endpoint: str | None, emulator: str | None, key_file: str | None, where: str) -> Self:
        """Choose from the manifest's endpoint, PUBSUB_EMULATOR_HOST and the content of the Secret."""
        host = endpoint or emulator or _GLOBAL_HOST
        plain = key_file is None and not host.rpartition(":")[0].endswith(".googleapis.com")
        if key_file is None:
            return cls(host, plain)
        try:
            content = json.loads(key_file)
        except ValueError:
            content = None
        if not isinstance(content, dict) or "type" not in content:
            raise ConfigError(f"{where}: the Secret of credentialsSecretRef holds no service account's JSON key")
        return cls(host, plain, content)


class PublisherChannel:
    """A gRPC channel for one topic. Belongs to the event loop on which it was created."""

    def __init__(self, channel: grpc.aio.Channel, topic: str) -> None:
        self._channel = channel
        self._topic = topic
        self._metadata = (("x-goog-request-params", f"topic={quote(topic, safe='')}"),)
        self._publish = channel.unary_unary(
            "/google.pubsub.v1.Publisher/Publish",
            request_serializer=_PublishRequest.SerializeToString,
            response_deserializer=PublishResponse.pb().FromString,
        )
        self._get_topic = channel.unary_unary(
            "/google.pubsub.v1.Publisher/GetTopic",
            request_serializer=_GetTopicRequest.SerializeToString,
            response_deserializer=Topic.pb().FromString,
        )

    async def publish(self, messages: Iterable[Message], ordering_key: str, *, timeout: float, topic: str) -> None:
        """Send one request, which succeeds or fails as a whole. Raises ``grpc.aio.AioRpcError``."""
        request = _PublishRequest(
            topic=topic,
            messages=[
                _Message(data=message.value or b"", attributes=message.headers, ordering_key=ordering_key)
                for message in messages
            ],
        )
        metadata = self._metadata if topic == self._topic else None
        await self._publish(request, timeout=timeout, metadata=metadata)

    async def look_up_topic(self, topic: str, *, timeout: float) -> None:
        """Check that a topic of the project exists. Raises ``grpc.aio.AioRpcError``."""
        await self._get_topic(_GetTopicRequest(topic=topic), timeout=timeout, metadata=self._metadata)

    async def close(self) -> None:
        await self._channel.close()


async def open_channel(destination: PubSubEndpoint, field: str) -> grpc.aio.Channel:
    """Create a channel; it connects later. Raises ``SinkUnavailable`` if there are no credentials, which belong into
    ``credentialsSecretRef`` of the manifest's ``field``."""
    if destination.plain:
        return grpc.aio.insecure_channel(destination.host, options=_OPTIONS)
    try:
        credentials = await in_a_thread(partial(_credentials, destination.key_file), "pubsub-login")
    except (google.auth.exceptions.GoogleAuthError, ValueError) as error:
        raise SinkUnavailable(
            f"no credentials for Pub/Sub: {error}; set {field}.credentialsSecretRef, or give the pod's service account "
            "a workload identity"
        ) from error
    return PublisherGrpcAsyncIOTransport.create_channel(
        destination.host, credentials=credentials, scopes=_SCOPES, options=_OPTIONS
    )


def unavailable(error: grpc.aio.AioRpcError, topic: str, host: str, seconds: float) -> SinkUnavailable:
    """Return an error that states the cause and the remedy. ``seconds`` is the time-out of the call."""
    code, details = error.code(), error.details() or ""
    text = _UNAVAILABLE.get(code, "{where} can't take events just now: {details} ({code})")
    where = f"Pub/Sub at {host}"
    return SinkUnavailable(text.format(where=where, topic=topic, details=details, seconds=seconds, code=code.name))


def _credentials(key_file: Mapping[str, Any] | None) -> Any:
    if key_file is not None:
        return google.auth.load_credentials_from_dict(dict(key_file), scopes=_SCOPES)[0]  # type: ignore[no-untyped-call]
    return google.auth.default(scopes=_SCOPES)[0]
