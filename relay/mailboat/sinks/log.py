"""The log sink: JSON lines to standard output or appended to a file, for trials and for pipes into other programs.

A thread writes the lines, since a slow reader of the pipe must not block the event loop. It writes pieces that a pipe
accepts without blocking, so that a timeout or cancellation stops between two pieces and nothing is written later.
"""

import asyncio
import base64
import json
import os
import select
import stat
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from mailboat.errors import EventRefused, SinkUnavailable, Undecided
from mailboat.model import Message
from mailboat.sinks.daemon_thread import in_a_thread
from mailboat.sinks.key_fence import FenceTicket, KeyFence
from mailboat.sinks.protocol import ALL_DELIVERED, Failures, SinkContext, Traits

_STDOUT: Final = 1
_PIPE_PIECE: Final = select.PIPE_BUF  # a pipe that is ready accepts this much without blocking
_FILE_PIECE: Final = 1024 * 1024
_POLL_MS: Final = 50


class LogSink:
    """Writes one line per message: id, key, headers, and the value as text, or in base64 if it is not UTF-8."""

    traits = Traits(header_prefix="ce_", stops_behind_failure=True)

    def __init__(self, path: Path | None, *, delivery_timeout: float = 30.0, descriptor: int = _STDOUT) -> None:
        self._path = path
        self._delivery_timeout = delivery_timeout
        self._descriptor: int | None = descriptor if path is None else None
        self._torn = False
        self._turn = asyncio.Lock()
        self._fence = KeyFence()
        self._closed = False

    @classmethod
    def build(cls, config: Any, context: SinkContext) -> Self:
        path = None if config.path is None else Path(config.path)
        return cls(path, delivery_timeout=context.delivery_timeout)

    async def open(self) -> None:
        self._closed = False
        if self._path is None or self._descriptor is not None:
            return
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unavailable(error) from error

    def refusal(self, message: Message) -> EventRefused | None:
        return None

    def publish(self, batch: Sequence[Message]) -> Coroutine[Any, Any, Failures]:
        return self._publish(batch, FenceTicket(self._fence))

    async def _publish(self, batch: Sequence[Message], hold: FenceTicket) -> Failures:
        deadline = time.monotonic() + self._delivery_timeout
        with hold:
            try:
                async with asyncio.timeout(self._delivery_timeout):
                    await self._turn.acquire()
            except TimeoutError:
                silence = SinkUnavailable(f"{self._place} took nothing for {self._delivery_timeout:g} s")
                return hold.fail(batch, range(len(batch)), silence)
            try:
                hold.begin()
                if hold.blocked and any(message.key in hold.blocked for message in batch):
                    return hold.fail(batch, range(len(batch)), Undecided("stands behind a failed write"))
                written, error = await self._write(batch, deadline)
            finally:
                self._turn.release()
            return ALL_DELIVERED if error is None else hold.fail(batch, range(written, len(batch)), error)

    async def close(self) -> None:
        self._closed = True
        async with self._turn:
            if self._path is not None and self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    async def _write(self, batch: Sequence[Message], deadline: float) -> tuple[int, SinkUnavailable | None]:
        """Write the batch and return the number of complete lines, and the error that prevented the others."""
        descriptor = self._descriptor
        if self._closed or descriptor is None:
            return 0, SinkUnavailable("the sink is not open")
        data = b"".join(map(_line, batch))
        cancelled = threading.Event()
        write = in_a_thread(partial(self._write_pieces, descriptor, data, deadline, cancelled), "log-sink")
        try:
            sent, error = await asyncio.shield(write)
        except asyncio.CancelledError:
            cancelled.set()
            while not write.done():  # the thread stops before its next piece
                # Wait even if cancelled again: the next call must not write while the thread is still writing.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([write])
            raise
        return data.count(b"\n", 0, sent), error

    def _write_pieces(
        self, descriptor: int, data: bytes, deadline: float, cancelled: threading.Event
    ) -> tuple[int, SinkUnavailable | None]:
        """Return the number of bytes written, and the error that prevented the rest. Runs in a thread."""
        view, sent = memoryview(data), 0
        piece = _FILE_PIECE if stat.S_ISREG(os.fstat(descriptor).st_mode) else _PIPE_PIECE
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        try:
            if self._torn:
                os.write(descriptor, b"\n")  # ends the partial line of the last failure, so that the next one is intact
                self._torn = False
            while sent < len(view):
                if cancelled.is_set() or time.monotonic() >= deadline:
                    return sent, SinkUnavailable(f"{self._place} took nothing more: does its reader still read?")
                if ready.poll(_POLL_MS):
                    sent += os.write(descriptor, view[sent : sent + piece])
            return sent, None
        except OSError as error:
            return sent, self._unavailable(error)
        finally:
            self._torn = self._torn or (0 < sent < len(view) and data[sent - 1 : sent] != b"\n")

    @property
    def _place(self) -> str:
        return "standard output" if self._path is None else str(self._path)

    def _unavailable(self, error: OSError) -> SinkUnavailable:
        return SinkUnavailable(
            f"can't write to {self._place}: {error.strerror}; correct it or change spec.sink.log.path"
        )


def _line(message: Message) -> bytes:
    record: dict[str, Any] = {"event_id": message.event_id, "key": message.key}
    if message.topic is not None:
        record["topic"] = message.topic
    record["headers"] = message.headers
    if message.value is None:
        record["value"] = None
    else:
        try:
            record["value"] = message.value.decode()
        except UnicodeDecodeError:
            record["value_base64"] = base64.b64encode(message.value).decode()
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace") + b"\n"
