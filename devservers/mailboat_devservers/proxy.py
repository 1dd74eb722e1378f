"""A TCP proxy on the loopback interface that simulates network failures between two healthy servers.

The proxy runs an event loop in a daemon thread, so that synchronous and asynchronous tests can use it. Every method
returns after its effect is complete.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from mailboat_devservers.ports import free_port

_CHUNK = 64 * 1024


class Proxy:
    """Forwards connections from ``port`` to the target."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.port = free_port()
        self._target = (target_host, target_port)
        self._server: asyncio.Server | None = None
        self._open = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._hearing = asyncio.Event()
        self._losing_reply = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()
        self.undeafen()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Accept connections (again)."""
        self._run(self._start())

    def stop(self) -> None:
        """Refuse new connections and drop the open ones."""
        self._run(self._stop())

    def cut(self) -> None:
        """Drop the open connections; accept new ones."""
        self._run(self._cut())

    def retarget(self, port: int) -> None:
        """Forward new connections to another port; drop the open ones."""
        self._target = (self._target[0], port)
        self.cut()

    def deafen(self) -> None:
        """Keep connections and accept new ones, but forward no data in either direction."""
        self._run(self._set_hearing(False))

    def undeafen(self) -> None:
        """Forward data again, including the data held back so far."""
        self._run(self._set_hearing(True))

    def lose_reply(self) -> None:
        """Drop the target's next answer, and the connection: the request was executed, and the client can't know."""
        self._losing_reply = True

    def close(self) -> None:
        """Stop permanently. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    async def _set_hearing(self, hearing: bool) -> None:
        if hearing:
            self._hearing.set()
        else:
            self._hearing.clear()

    async def _start(self) -> None:
        self._open = True
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _stop(self) -> None:
        self._open = False
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()

    async def _cut(self) -> None:
        for writer in self._writers:
            # Abort, not close: buffered data must not reach the peer after the cut.
            writer.transport.abort()
        # Cancel own tasks only: the event loop has tasks for connections in accept, and would leak their sockets.
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:  # stopped during accept
            writer.transport.abort()
            return
        # Register the writer before the task starts: a cut may cancel the task before its first step.
        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._serving.discard(task)
            self._forget(writer)

        task.add_done_callback(over)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._hearing.wait()
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except (OSError, asyncio.CancelledError):
            return
        self._writers.add(target_writer)
        try:
            await asyncio.gather(self._pass_on(reader, target_writer), self._pass_on(target_reader, writer, reply=True))
        except (OSError, asyncio.CancelledError):
            pass  # a closed connection is no error here
        finally:
            self._forget(target_writer)

    async def _pass_on(
        self, source: asyncio.StreamReader, destination: asyncio.StreamWriter, *, reply: bool = False
    ) -> None:
        while data := await source.read(_CHUNK):
            await self._hearing.wait()
            if reply and self._losing_reply:
                self._losing_reply = False
                destination.transport.abort()
                return
            destination.write(data)
            await destination.drain()
        if destination.can_write_eof():
            destination.write_eof()

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self._writers.discard(writer)
