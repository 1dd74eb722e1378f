"""Speaks with relays over HTTP: asks for their status, hands them configuration and assignments, signed.

A relay that does not answer is an answer too; nothing here raises. Answers come from pods that applications own, so
they are bounded in size and time, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Final, Protocol, Self

import aiohttp

from mailboat_operator.pods import RelayPod
from mailboat_operator.reports import Answer, read_report

_LARGEST: Final = 4 * 1024 * 1024
_LARGEST_ERROR: Final = 500


class Signer(Protocol):
    """Makes tokens that relays believe."""

    def public_keys(self) -> str:
        """PEM: every key that relays should know, now."""
        ...

    def token(self, audience: str, method: str, path: str, body: bytes) -> str:
        """A token for one call."""
        ...


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of a push: a status code, or 0 where there was no answer, and the relay's words."""

    code: int
    text: str

    @property
    def taken(self) -> bool:
        return self.code == 200


class RelayClient:
    """One for the whole operator: it bounds how many relays are spoken to at a time."""

    def __init__(self, signing: Signer, *, timeout: float = 3.0, concurrency: int = 32) -> None:
        self._signing = signing
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._places = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No connection is kept: relays come and go, and the next look is seconds away.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def status(self, pod: RelayPod) -> Answer:
        """What the relay says about itself."""
        if not pod.address:
            return Answer(pod.name, None, "has no address yet")
        code, text = await self._call("GET", pod, "/status", b"")
        if code != 200:
            return Answer(pod.name, None, f"/status answered {code}" if code else text)
        try:
            report = read_report(json.loads(text))
        except (ValueError, RecursionError):
            report = None
        if report is None:
            return Answer(pod.name, None, "answered something that is no status")
        if any(each.relay and each.relay != pod.name for each in report.relays):
            return Answer(pod.name, None, "another relay answers at its address")  # given to a new pod by now
        return Answer(pod.name, report)

    async def put_config(self, pod: RelayPod, text: str) -> Pushed:
        return await self._put(pod, "/config", text.encode())

    async def put_assignment(self, pod: RelayPod, request: dict[str, object]) -> Pushed:
        return await self._put(pod, "/assignment", json.dumps(request).encode())

    async def _put(self, pod: RelayPod, path: str, body: bytes) -> Pushed:
        token = self._signing.token(pod.audience, "PUT", path, body)
        code, text = await self._call("PUT", pod, path, body, {"Authorization": f"Bearer {token}"})
        return Pushed(code, text[:_LARGEST_ERROR])

    async def _call(
        self, method: str, pod: RelayPod, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        assert self._session is not None, "used as a context manager"
        async with self._places:
            try:
                async with self._session.request(
                    method, f"http://{pod.address}{path}", data=body or None, headers=headers, allow_redirects=False
                ) as response:
                    content = bytearray()
                    async for chunk in response.content.iter_chunked(65536):
                        content += chunk
                        if len(content) > _LARGEST:
                            return 0, "answered more than a status can have"
                    return response.status, content.decode(errors="replace")
            except TimeoutError:
                return 0, "did not answer in time"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                return 0, _reason(error)


def _reason(error: Exception) -> str:
    """Without addresses: they change with every restart, and a message that changes is written again."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't be connected to ({error.os_error.strerror or 'no route'})"
    return "broke off its answer"
