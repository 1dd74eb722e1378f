"""HTTP client that reads the status of relays and consumers, for ``mailboat status``."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mailboat_spec.consumer_report import ConsumerReport, read_consumer_reports

_LARGEST = 16 * 1024 * 1024
_NO_ADDRESS = "that is no address: write http://host:port"


@dataclass(frozen=True, slots=True)
class StatusResponse:
    """Status of one process with relays or consumers, or the error of the request."""

    url: str
    relays: tuple[dict[str, Any], ...] = ()
    consumers: tuple[ConsumerReport, ...] = ()
    error: str | None = None
    config_error: str | None = None
    """Why the relay rejected its latest configuration."""


async def fetch_statuses(urls: Sequence[str], *, timeout: float = 3.0) -> list[StatusResponse]:
    """Request the status of all processes concurrently. Returns one answer per URL, in order, also if it failed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
        return list(await asyncio.gather(*(_fetch(session, url) for url in urls)))


async def _fetch(session: aiohttp.ClientSession, url: str) -> StatusResponse:
    base = url if "://" in url else f"http://{url}"
    if not base.lower().startswith(("http://", "https://")):
        return StatusResponse(url, error=_NO_ADDRESS)
    try:
        async with session.get(f"{base.rstrip('/')}/status") as response:
            if response.status != 200:
                return StatusResponse(url, error=f"answered {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                body += chunk
                if len(body) > _LARGEST:
                    return StatusResponse(url, error="answered more than a status can have")
        document = json.loads(body)
        if "relays" not in document and (consumers := read_consumer_reports(bytes(body))):
            return StatusResponse(url, consumers=consumers)
        relays = tuple(relay for relay in document["relays"] if isinstance(relay, dict))
        config_error = document.get("config", {}).get("error")
        return StatusResponse(url, relays, config_error=None if config_error is None else str(config_error))
    except aiohttp.InvalidURL:
        return StatusResponse(url, error=_NO_ADDRESS)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return StatusResponse(url, error=str(error) or "did not answer in time")
    except (ValueError, KeyError, TypeError, AttributeError):
        return StatusResponse(url, error="answered something that is no status of a relay or consumer")
