"""Google Pub/Sub for tests: Google's own fake as a server process, with all state in memory."""

from __future__ import annotations

from mailboat_devservers.golang import built_program
from mailboat_devservers.ports import accepts_connections, free_port
from mailboat_devservers.processes import Child

__all__ = ["PubSubServer", "start_pstest"]


class PubSubServer(Child):
    """A Pub/Sub server. ``host`` is the value for ``PUBSUB_EMULATOR_HOST``."""

    def __init__(self, command: list[str], port: int) -> None:
        super().__init__(f"pstest on port {port}", command, log=None, ready=lambda: accepts_connections(port))
        self.port = port
        self.host = f"127.0.0.1:{port}"


def start_pstest(port: int | None = None) -> PubSubServer:
    """Start a Pub/Sub server without topics. The client library connects to it instead of Google's."""
    port = port or free_port()
    server = PubSubServer([str(built_program("pstest")), "-port", str(port)], port)
    server.launch()
    return server
