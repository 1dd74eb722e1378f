"""Mapping of gRPC status codes: message refused or destination unavailable, with the remedy for the operator."""

from __future__ import annotations

from typing import Final

import grpc

from mailboat.errors import EventRefused, SinkUnavailable

REFUSING: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})
"""The service read the request and refused it. A request fails as a whole, whichever of its messages is at fault."""


def refused(error: grpc.aio.AioRpcError) -> EventRefused:
    return EventRefused(f"Pub/Sub refused it: {error.details()} ({error.code().name})")


def unavailable(error: grpc.aio.AioRpcError, topic: str, host: str, seconds: float) -> SinkUnavailable:
    code, details = error.code(), error.details() or ""
    where = f"Pub/Sub at {host}"
    if code is grpc.StatusCode.NOT_FOUND:
        return SinkUnavailable(
            f"{topic} does not exist on {where}: create it, or correct spec.sink.pubsub.project and topic"
        )
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return SinkUnavailable(
            f"{where} does not let this identity publish to {topic}: grant it roles/pubsub.publisher ({details})"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return SinkUnavailable(
            f"{where} does not accept the credentials: check credentialsSecretRef or the workload identity ({details})"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return SinkUnavailable(f"{where} says that a quota is used up: {details}; raise it, or wait")
    if code is grpc.StatusCode.FAILED_PRECONDITION:  # about project and topic, not about the message
        return SinkUnavailable(
            f"{where} takes nothing for {topic} as things are: {details}; check the project's billing, the key that "
            "the topic is encrypted with, and whether its storage policy allows the region of this relay"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return SinkUnavailable(f"no answer from {where} within {seconds:g} s; is it up, and may the relay reach it?")
    if code is grpc.StatusCode.UNAVAILABLE:
        return SinkUnavailable(f"{where} can't be reached: {details}; is it up, and may the relay reach it?")
    return SinkUnavailable(f"{where} can't take events just now: {details} ({code.name})")
