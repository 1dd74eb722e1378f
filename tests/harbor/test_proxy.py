"""A network that can be taken away between two healthy parts."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest

from mailboat_harbor.ports import free_port
from mailboat_harbor.proxy import Proxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1024):
            self.request.sendall(data)


class EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients of a proxy that cuts connections go away rudely


@pytest.fixture
def echo_port() -> Iterator[int]:
    with EchoServer(("127.0.0.1", free_port()), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo_port: int, proxy_factory: Callable[[int], Proxy]) -> Proxy:
    return proxy_factory(echo_port)


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy) as connection:
        yield connection


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def ask(client: socket.socket, question: bytes) -> bytes:
    client.sendall(question)
    return client.recv(1024)


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_it_passes_everything_on(client: socket.socket) -> None:
    assert ask(client, b"hello") == b"hello"


def test_a_cut_ends_living_connections_only(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client, b"before") == b"before"
    proxy.cut()
    assert is_cut(client)
    with connect(proxy) as another:
        assert ask(another, b"after") == b"after"


def test_a_connection_that_is_cut_in_the_moment_of_its_arrival_is_not_left_open(proxy: Proxy) -> None:
    ours, theirs = socket.socketpair()

    async def arrive_and_be_cut() -> None:
        proxy._accept(*await asyncio.open_connection(sock=ours))
        await proxy._cut()  # in the same turn of the loop: nobody has begun to serve it

    with theirs:
        theirs.settimeout(60)
        proxy._run(arrive_and_be_cut())
        assert is_cut(theirs)


def test_a_stopped_proxy_refuses_until_it_is_started_again(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client, b"before") == b"before"
    proxy.stop()
    assert is_cut(client)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.start()
    with connect(proxy) as another:
        assert ask(another, b"after") == b"after"


def test_a_deaf_proxy_accepts_and_swallows(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client, b"before") == b"before"
    proxy.deafen()
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        ask(client, b"anybody there?")
    with connect(proxy) as another:
        another.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ask(another, b"hello?")
        proxy.undeafen()
        another.settimeout(60)
        client.settimeout(60)
        assert client.recv(1024) == b"anybody there?"
        assert another.recv(1024) == b"hello?"


def test_a_target_that_is_away_ends_the_connection(proxy_factory: Callable[[int], Proxy]) -> None:
    with connect(proxy_factory(free_port())) as client:
        assert is_cut(client)


def test_a_closed_connection_is_passed_on(proxy: Proxy, client: socket.socket) -> None:
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1024) == b"last words"
    assert client.recv(1024) == b""


async def test_it_works_under_an_event_loop(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    proxy.cut()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
