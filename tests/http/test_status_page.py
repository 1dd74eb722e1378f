"""The page at ``/``, as HTML and in a real browser."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest

from mailboat.runtime.relay_status import RelayState
from mailboat.store.coverage import Coverage
from support.http_api import Relays
from support.relay_statuses import partition, relay, subscription

HOSTILE = "<script>alert('x')</script><img src=//evil.example/x>" + "&<\">'" * 400
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "relay-page.png"


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


async def fetched(client: aiohttp.ClientSession) -> tuple[str, Page]:
    async with client.get("/") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        text = await response.text()
    page = Page()
    page.feed(text)
    return text, page


async def test_the_page_shows_subscriptions_owners_and_errors(client: aiohttp.ClientSession, relays: Relays) -> None:
    relays.statuses = [relay(subscriptions=(subscription(last_error="no broker", last_error_age=192.0),))]
    text, page = await fetched(client)
    for shown in ("shop/orders-to-kafka", "4/4", "12.5/s", "no broker (3m ago)", "shop/orders-to-kafka 3", "b"):
        assert f"\n{shown}\n" in page.text
    assert '<meta http-equiv=refresh content="5">' in text


async def test_a_relay_without_configuration_is_reported(client: aiohttp.ClientSession, relays: Relays) -> None:
    assert "No configuration yet." in (await fetched(client))[1].text


async def test_the_page_is_bounded_and_escapes_all_values(client: aiohttp.ClientSession, relays: Relays) -> None:
    each = subscription(name=HOSTILE, sink=HOSTILE, last_error=HOSTILE, partitions=256, owners={0: HOSTILE})
    hostile = relay(
        name=HOSTILE, message=HOSTILE, retention_blocked=HOSTILE, peers=(HOSTILE,), subscriptions=(each,) * 999
    )
    relays.statuses = [hostile]
    text, page = await fetched(client)
    assert len(text) < 2_000_000
    assert not page.tags & {"script", "img", "iframe", "link", "form"}
    assert "and 799 more subscriptions" in page.text


def _browser() -> str | None:
    names = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.mark.verify
@pytest.mark.skipif(_browser() is None, reason="needs chromium: apt-get install chromium")
async def test_a_real_browser_shows_the_page(client: aiohttp.ClientSession, relays: Relays, tmp_path: Path) -> None:
    """With MAILBOAT_PICTURES=1, also replace the picture of the documentation."""
    away = subscription(
        name="shop/orders-to-pubsub",
        sink="pubsub",
        sink_reachable=False,
        lag=37,
        oldest_age=192.0,
        rate=0.0,
        last_error="the broker does not answer: connection refused",
        last_error_age=3.0,
    )
    whole = subscription(owned=tuple(map(partition, range(4))), parked=0, dead=0)
    unmatched = Coverage({"orders.placed": 2})
    relays.statuses = [relay(state=RelayState.RUNNING, subscriptions=(whole, away), coverage=unmatched)]
    address = str(client._base_url)
    picture = tmp_path / "page.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]

    async def browser(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(_browser()), *flags, *arguments, address, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
        return output.decode()

    page = Page()
    page.feed(await browser("--dump-dom"))
    assert "the broker does not answer: connection refused (3s ago)" in page.text
    assert "that no subscription matches, by type: orders.placed (2)" in page.text
    await browser(f"--screenshot={picture}", "--window-size=1180,640")
    assert picture.read_bytes().startswith(b"\x89PNG")
    if os.environ.get("MAILBOAT_PICTURES"):
        PICTURE.write_bytes(picture.read_bytes())
    assert PICTURE.read_bytes().startswith(b"\x89PNG")
