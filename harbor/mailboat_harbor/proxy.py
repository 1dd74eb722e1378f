"""A TCP proxy on the loopback interface that a test can stop, cut or leave deaf: the network between two healthy parts.

It runs an event loop of its own in a daemon thread, so that plain and asynchronous tests use it alike. Every method
returns once what it says is true.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from mailboat_harbor.ports import free_port

_CHUNK = 64 * 1024


class Proxy:
    """Passes connections to its own ``port`` on to the target."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.port = free_port()
        self._target = (target_host, target_port)
        self._server: asyncio.Server | None = None
        self._open = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._hearing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()
        self.undeafen()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Take connections (again)."""
        self._run(self._start())

    def stop(self) -> None:
        """Refuse new connections and cut the living ones."""
        self._run(self._stop())

    def cut(self) -> None:
        """Drop the living connections; new ones are welcome."""
        self._run(self._cut())

    def retarget(self, port: int) -> None:
        """Pass new connections on to another port; the living ones are cut."""
        self._target = (self._target[0], port)
        self.cut()

    def deafen(self) -> None:
        """Keep connections and accept new ones, and pass nothing on in either direction: a network that swallows."""
        self._run(self._set_hearing(False))

    def undeafen(self) -> None:
        """Pass on again, what was held back included."""
        self._run(self._set_hearing(True))

    def close(self) -> None:
        """Stop for good. Safe to call twice."""
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
            # Abort, not close: what is still buffered must not reach the other side after the cut.
            writer.transport.abort()
        # Ours only: the event loop has tasks of its own for what it is just accepting, and would lose the socket.
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:  # stopped, while this one was being accepted
            writer.transport.abort()
            return
        # Before its task has taken a step: a cut that comes first ends the task, and it would never begin.
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
            await asyncio.gather(self._pass_on(reader, target_writer), self._pass_on(target_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the end of a connection is not an error here
        finally:
            self._forget(target_writer)

    async def _pass_on(self, source: asyncio.StreamReader, destination: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self._hearing.wait()
            destination.write(data)
            await destination.drain()
        if destination.can_write_eof():
            destination.write_eof()

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self._writers.discard(writer)
