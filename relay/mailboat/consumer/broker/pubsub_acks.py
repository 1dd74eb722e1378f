"""Acknowledgements and nacks on their way to Pub/Sub: many ids per call, with retries, and the result for each id."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2, status_pb2

log = logging.getLogger(__name__)

IDS_PER_REQUEST: Final = 1_000
_FIRST_BACKOFF: Final = 0.1
_LONGEST_BACKOFF: Final = 5.0
_PERMANENT: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION})


@dataclass(frozen=True, slots=True)
class CallResult:
    """Ids of a call that were not accepted."""

    retry: Iterable[str] = ()
    failed: Iterable[str] = ()
    """The service has dropped these ack ids: their messages are redelivered."""


def result_of(error: grpc.aio.AioRpcError, ack_ids: list[str]) -> CallResult:
    """Return the result of a failed call. With exactly-once delivery the error names the ids that failed."""
    named = _errors_by_id(error)
    if named:
        retry = [ack_id for ack_id in ack_ids if named.get(ack_id, "").startswith("TRANSIENT_")]
        return CallResult(retry, [ack_id for ack_id in ack_ids if ack_id in named and ack_id not in retry])
    if error.code() in _PERMANENT:
        return CallResult(failed=ack_ids)
    return CallResult(retry=ack_ids)


def _errors_by_id(error: grpc.aio.AioRpcError) -> dict[str, str]:
    info = error_details_pb2.ErrorInfo()
    for name, value in error.trailing_metadata():
        if name == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return dict(info.metadata)
    return {}


class AckQueue:
    """Ids that wait for one kind of call. Sends many per call, one call at a time, and retries with back-off."""

    def __init__(self, send: Callable[[list[str]], Coroutine[Any, Any, CallResult]]) -> None:
        self._send = send
        self._waiting: dict[str, Callable[[], None] | None] = {}
        self._added = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, ack_ids: Iterable[str], confirmed: Callable[[], None] | None) -> None:
        for ack_id in ack_ids:
            self._waiting.setdefault(ack_id, confirmed)
        self._idle.clear()
        self._added.set()

    async def empty(self) -> None:
        await self._idle.wait()

    async def run(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            await self._added.wait()
            ids = list(self._waiting)[:IDS_PER_REQUEST]
            result = await self._send(ids)
            retry = {*result.retry}
            for confirmed in {self._waiting.pop(ack_id) for ack_id in ids if ack_id not in retry} - {None}:
                assert confirmed is not None
                confirmed()
            if failed := [*result.failed]:
                log.debug("Pub/Sub lease expired, message will be redelivered", extra={"messages": len(failed)})
            if not self._waiting:
                self._added.clear()
                self._idle.set()
            elif retry:
                await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF) if retry else _FIRST_BACKOFF
