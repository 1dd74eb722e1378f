"""Sessions are closed reliably, even if the server never completes the TLS shutdown."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from mailboat_operator.kube.client import ClosableConnections
from support.certificate_authority import Authority

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


class Silent:
    """A TLS server that begins a response, never ends it, and reads nothing after the request."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        keystore = folder / "keystore.pem"
        keystore.write_text(authority.keystore())
        self.authority = authority
        self.trust = ssl.create_default_context(cadata=authority.certificate)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(keystore)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}/"
        self.answered = threading.Event()
        self.over = threading.Event()

    def serve_one(self) -> None:
        with self._listener, self._listener.accept()[0] as plain, self._tls.wrap_socket(plain, server_side=True) as tls:
            tls.recv(4096)
            tls.sendall(STREAM)
            self.answered.set()
            self.over.wait(60)


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Silent]:
    server = Silent(Authority("test"), tmp_path)
    thread = threading.Thread(target=server.serve_one)
    thread.start()
    yield server
    server.over.set()
    thread.join(60)


async def test_a_stream_ends_although_the_server_does_not_close_it(silent: Silent) -> None:
    connections = ClosableConnections()
    session = aiohttp.ClientSession(connector=connections.connector(silent.trust))
    response = await session.get(silent.url)
    assert await response.content.readany() == b"{}"
    response.close()
    await session.close()
    await asyncio.sleep(0)
    assert connections._open, "it still waits for the other side's farewell: so this is about something"
    await connections.close()
    assert connections._open == []


async def test_closing_twice_changes_nothing() -> None:
    connections = ClosableConnections()
    await connections.connector(ssl.create_default_context()).close()
    await connections.close()
    await connections.close()
