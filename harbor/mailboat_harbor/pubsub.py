"""Google Pub/Sub for tests: Google's own fake as a server process. It forgets everything when it ends."""

from __future__ import annotations

from mailboat_harbor.golang import built_program
from mailboat_harbor.ports import accepts_connections, free_port
from mailboat_harbor.processes import Child

__all__ = ["PubSubServer", "start_pstest"]


class PubSubServer(Child):
    """``host`` is what ``PUBSUB_EMULATOR_HOST`` wants."""

    def __init__(self, command: list[str], port: int) -> None:
        super().__init__(f"pstest on port {port}", command, log=None, ready=lambda: accepts_connections(port))
        self.port = port
        self.host = f"127.0.0.1:{port}"


def start_pstest(port: int | None = None) -> PubSubServer:
    """A Pub/Sub server without topics; the client library talks to it in place of Google's."""
    port = port or free_port()
    server = PubSubServer([str(built_program("pstest")), "-port", str(port)], port)
    server.launch()
    return server
