"""The command line against real databases: manifests in a folder, commands in this process, relays in their own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import yaml
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from mailboat.cli.main import main
from mailboat.store.postgres import PostgresStore
from mailboat.store.settings import RelayIdentity, StoreSettings
from mailboat_devservers.postgres import Database
from mailboat_spec import EventSubscription
from support.manifests import event_subscription, outbox_relay_on
from support.wait import wait_until

relay_manifest = outbox_relay_on
subscription_manifest = partial(event_subscription, partitions=2)


@dataclass
class Place:
    """A folder of manifests, and commands that read it."""

    folder: Path
    database: Database
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, *documents: dict[str, Any], name: str = "manifests.yaml") -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump_all(documents))
        return path

    def mailboat(self, *arguments: str, manifests: bool = True) -> Result:
        """Run a command in this process."""
        files = ["-f", str(self.folder)] if manifests else []
        return CliRunner(env=self.environment).invoke(main, [*arguments, *files], terminal_width=100)

    def ok(self, *arguments: str) -> str:
        """Run a command that must succeed and return its output."""
        result = self.mailboat(*arguments)
        assert result.exit_code == 0, f"{arguments}: exit code {result.exit_code}\n{result.output}\n{result.exception}"
        return result.stdout


async def make_known(database: Database, *manifests: dict[str, Any]) -> list[int]:
    """Declare subscriptions as a relay does, and return their numbers."""
    store = await PostgresStore.open(lambda: database.url, RelayIdentity("test", str(uuid.uuid4())), StoreSettings())
    try:
        resources = [EventSubscription.model_validate(manifest, by_alias=True) for manifest in manifests]
        return list(await store.declare(list(resources)))
    finally:
        await store.close(leave=True)


# ---- relay processes ----------------------------------------------------------------------------------------------


def answer(request: str | urllib.request.Request) -> tuple[int, str]:
    """Return status and body of the response to a request."""
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class RunningRelay:
    """``mailboat run`` as a process."""

    def __init__(self, arguments: Sequence[str], log: Path, output: Path = Path(os.devnull)) -> None:
        """Start the relay. ``output`` is the file for standard output, where the log sink writes."""
        self._log = log
        with log.open("wb") as stderr, output.open("wb") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mailboat.cli.main", "run", "--listen", "127.0.0.1:0", *arguments],
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines of the log."""
        whole = self._log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def address(self) -> str:
        def listening() -> str | None:
            assert self.process.poll() is None, f"the relay ended:\n{self._log.read_text()}"
            return next((line["address"] for line in self.lines() if line["message"] == "Listening."), None)

        # The imports take seconds of CPU time, and ten times as long on a busy machine.
        return str(wait_until(listening, timeout=60, what=f"the relay to listen (its log: {self._log})"))

    def get(self, path: str) -> tuple[int, str]:
        assert self.process.poll() is None, f"the relay ended:\n{self._log.read_text()}"
        return answer(self.address() + path)

    def put(self, path: str, body: bytes, token: str) -> tuple[int, str]:
        request = urllib.request.Request(
            self.address() + path, data=body, headers={"Authorization": f"Bearer {token}"}, method="PUT"
        )
        return answer(request)

    def wait_ready(self) -> None:
        wait_until(lambda: self.get("/readyz")[0] == 200, timeout=60, what="the relay to be ready")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=90)


class Operator:
    """Signer of requests in the way of the operator."""

    def __init__(self, audience: str) -> None:
        self.audience = audience
        self._key = Ed25519PrivateKey.generate()

    @property
    def public_keys(self) -> str:
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def sign(self, method: str, path: str, body: bytes, **claims: Any) -> str:
        now = int(time.time())
        usual: dict[str, Any] = {
            "iss": "mailboat-operator",
            "aud": self.audience,
            "iat": now,
            "exp": now + 60,
            "sub": f"{method} {path}",
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        chosen = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode(chosen, self._key, algorithm="EdDSA")
