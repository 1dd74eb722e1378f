"""Fixtures for pytest: ``pytest_plugins = ["mailboat.testing.fixtures"]`` in a conftest.py."""

from collections.abc import Callable
from typing import Any

import pytest

from mailboat.testing.consumer_bench import bench as make_bench
from mailboat.testing.emitted_events import assert_emitted


@pytest.fixture
def mailboat_bench() -> Callable[..., Any]:
    """``async with mailboat_bench(consumer) as box``: the consumer on an outbox in memory."""
    return make_bench


@pytest.fixture
def assert_event_emitted() -> Callable[..., Any]:
    """``assert_event_emitted(connection, "order.placed", key="o-1")``."""
    return assert_emitted
