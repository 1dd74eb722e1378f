"""The page at ``/``. ``tests/api/test_dashboard.py`` opens it in a real browser."""

from __future__ import annotations

from html.parser import HTMLParser

import aiohttp

from support.http_api import Relays
from support.relay_statuses import relay, subscription

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
