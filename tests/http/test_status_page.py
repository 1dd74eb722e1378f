"""The page at ``/``, as HTML and in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest

from mailboat.runtime.relay_status import RelayState
from mailboat.store.coverage import Coverage
from support.browser import Browser
from support.http_api import Relays
from support.relay_statuses import partition, relay, subscription

HOSTILE = "<script>alert('x')</script><img src=//evil.example/x>" + "&<\">'" * 400


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


@pytest.mark.verify
async def test_a_real_browser_shows_the_page(
    client: aiohttp.ClientSession, relays: Relays, tmp_path: Path, or_skip: Callable[[Callable[[], Browser]], Browser]
) -> None:
    browser = or_skip(lambda: Browser.find(tmp_path / "profile"))
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
    page = Page()
    page.feed(await asyncio.to_thread(browser.document, address))
    assert "the broker does not answer: connection refused (3s ago)" in page.text
    assert "that no subscription matches, by type: orders.placed (2)" in page.text
