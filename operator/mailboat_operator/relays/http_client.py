"""HTTP client for relays: read their status, and push signed configurations and assignments.

Nothing here raises: an unresponsive relay is a result. Answers come from pods that applications own, so their size and
their time are bounded, they are not decompressed, and redirects are not followed.
"""

import asyncio
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

import aiohttp

from mailboat_operator.http_server import Memory
from mailboat_operator.relays.pods import ConsumerPod, PolledPod, RelayPod
from mailboat_operator.relays.reports import Answer, ConsumerAnswer, Partitions, bounded, largest_report
from mailboat_operator.relays.signing_keys import Signer, mint
from mailboat_spec.assignment import AssignmentRequest
from mailboat_spec.consumer_report import LARGEST_REPORT, read_consumer_reports
from mailboat_spec.names import CONSUMER_PORT_NAME
from mailboat_spec.relay_status import read_process_status
from mailboat_spec.wire_format import pack

_MEMORY: Final = 12 * 1024 * 1024
"""Bytes of all answers read concurrently; enough for the largest one."""
_LARGEST_ERROR: Final = 500
_WORTH_A_THREAD: Final = 64 * 1024
"""Size in bytes from which parsing takes milliseconds and runs in a thread."""


@dataclass(frozen=True, slots=True)
class PushResponse:
    """Result of a push: status code (0 if there was no answer) and the relay's response text."""

    code: int
    text: str


class RelayClient:
    """HTTP client of the operator. It bounds the memory of answers; ``RelayStates`` bounds the number of calls."""

    def __init__(self, signer: Signer, *, timeout: float = 3.0) -> None:
        self._signer = signer
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._memory = Memory(_MEMORY, max_waiters=sys.maxsize)
        self._session: aiohttp.ClientSession  # opened on entry

    async def __aenter__(self) -> Self:
        # ClosableConnections are not reused: relays come and go, and the next poll is seconds away.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, trust_env=False, auto_decompress=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def status(self, pod: RelayPod, relay: str, partitions: Partitions) -> Answer:
        """Return the report of a pod's relay about ``relay`` and these subscriptions."""
        if not pod.address:
            return Answer(pod, None, "has no address yet")
        most = largest_report(partitions)
        async with self._memory.reserved(most):
            code, content = await self._call("GET", pod, "/status", b"", most + 1)
            if code != 200:
                return Answer(pod, None, f"/status answered {code}" if code else content.decode())
            if len(content) > most:
                return Answer(pod, None, "answered more than a status can have")
            if len(content) > _WORTH_A_THREAD:
                return await asyncio.to_thread(_answer, pod, content, relay, partitions)
            return _answer(pod, content, relay, partitions)

    async def consumer_status(self, pod: ConsumerPod, subscription: str) -> ConsumerAnswer:
        """Return the report of a pod's consumer about ``subscription`` (namespace/name)."""
        if not pod.address:
            return ConsumerAnswer(pod, None, f"has no address, or no container port named {CONSUMER_PORT_NAME}")
        async with self._memory.reserved(LARGEST_REPORT):
            code, content = await self._call("GET", pod, "/status", b"", LARGEST_REPORT + 1)
        if code != 200:
            return ConsumerAnswer(pod, None, f"/status answered {code}" if code else content.decode())
        reports = read_consumer_reports(content) if len(content) <= LARGEST_REPORT else None
        if reports is None:
            return ConsumerAnswer(pod, None, "answered something that is no status of a consumer")
        report = next((each for each in reports if each.name == subscription), None)
        return ConsumerAnswer(pod, report, "" if report is not None else "runs another consumer")

    async def put_config(self, pod: RelayPod, content: bytes) -> PushResponse:
        return await self._put(pod, "/config", content)

    async def put_assignment(self, pod: RelayPod, assignment: AssignmentRequest) -> PushResponse:
        return await self._put(pod, "/assignment", pack(assignment.model_dump_json()))

    async def _put(self, pod: RelayPod, path: str, body: bytes) -> PushResponse:
        token = mint(self._signer.ring, pod.audience, "PUT", path, body, datetime.now(UTC))
        headers = {"Authorization": f"Bearer {token}"}
        code, content = await self._call("PUT", pod, path, body, _LARGEST_ERROR, headers)
        return PushResponse(code, content.decode(errors="replace"))

    async def _call(
        self, method: str, pod: PolledPod, path: str, body: bytes, most: int, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return the status code and the first ``most`` bytes of the answer, or 0 and a reason."""
        try:
            async with self._session.request(
                method, f"http://{pod.address}{path}", data=body or None, headers=headers, allow_redirects=False
            ) as response:
                content = bytearray()
                async for chunk in response.content.iter_chunked(65536):
                    content += chunk
                    if len(content) >= most:
                        break
                return response.status, bytes(content[:most])
        # No reason contains an address: it changes with every restart, and each changed message causes a status write.
        except TimeoutError:
            return 0, b"did not answer in time"
        except aiohttp.ClientConnectorError as error:
            return 0, f"can't be connected to ({error.os_error.strerror or 'no route'})".encode()
        except (aiohttp.ClientError, OSError, ValueError):
            return 0, b"broke off its answer"


def _answer(pod: RelayPod, content: bytes, relay: str, partitions: Partitions) -> Answer:
    report = read_process_status(content)
    if report is None:
        return Answer(pod, None, "answered something that is no status")
    if any(each.relay and each.relay != pod.relay_id for each in report.relays):
        return Answer(pod, None, "another relay answers at its address")  # the address was reassigned to a new pod
    return Answer(pod, bounded(report, relay, partitions))
