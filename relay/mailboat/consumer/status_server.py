"""Status of a consumer process: /livez, /readyz, /status and /metrics, as on a relay."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mailboat.consumer.report_metrics import ReportCollector
from mailboat.http.server import ConsumerHttpApi, HttpServer, parse_address
from mailboat_spec.consumer_report import ConsumerReport


async def run_with_status(
    listen: str | None,
    report: Callable[[], ConsumerReport],
    work: Coroutine[Any, Any, Any],
    stop: asyncio.Event,
    interrupt: Callable[[], None] = lambda: None,
) -> None:
    """Run the work and serve its status at ``listen``, if any. If this task is cancelled, set ``stop``, call
    ``interrupt``, and wait for the end of the work."""
    task = asyncio.ensure_future(work)
    server: HttpServer | None = None
    try:
        await asyncio.sleep(0)  # the work begins before its status is served
        if listen is not None:
            server = HttpServer(*parse_address(listen))
            await server.start(ConsumerHttpApi(report, ReportCollector(report)).routes())
        await asyncio.shield(task)
    except BaseException:
        stop.set()
        interrupt()
        await asyncio.gather(task, return_exceptions=True)
        raise
    finally:
        if server is not None:
            await server.close()
