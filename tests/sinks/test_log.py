"""The log sink beyond the common contract: lines, pipes with a slow reader, full disks."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mailboat.errors import SinkUnavailable
from mailboat.sinks.log import LogSink
from support.sink_backends import message
from support.wait import await_until


async def test_lines_are_appended_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"mine": true}\n')
    sink = LogSink(path)
    await sink.open()

    assert await sink.publish([message(1, value=b"\xff"), message(2, key=None)._replace(topic="dead")]) == {}
    await sink.close()

    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"mine": True},
        {"event_id": "event-1", "key": "k", "headers": {"event_id": "event-1"}, "value_base64": "/w=="},
        {"event_id": "event-2", "key": None, "topic": "dead", "headers": {"event_id": "event-2"}, "value": "2"},
    ]


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    sink = LogSink(tmp_path / "missing" / "events.jsonl")

    with pytest.raises(SinkUnavailable, match=r"missing/events\.jsonl: No such file.*spec\.sink\.log\.path"):
        await sink.open()


async def test_a_full_disk_costs_no_attempt() -> None:
    sink = LogSink(Path("/dev/full"))
    await sink.open()

    answer = await sink.publish([message(1)])

    assert isinstance(answer[0], SinkUnavailable)
    assert "No space left" in str(answer[0])
    await sink.close()


async def test_a_pipe_without_a_reader_times_out_and_unsent_lines_are_not_written_later() -> None:
    reading, writing = os.pipe()
    sink = LogSink(None, delivery_timeout=3.0, descriptor=writing)
    await sink.open()
    batch = [message(number, value=b"." * 1000) for number in range(200)]

    answer = await sink.publish(batch)

    assert 0 < len(answer) < 200, "the pipe's buffer holds some of the batch"
    assert set(answer) == set(range(200 - len(answer), 200)), "the first messages were written"
    os.set_blocking(reading, False)
    drained = _drain(reading)
    assert await sink.publish([message(999)]) == {}
    lines = (drained + _drain(reading)).splitlines()
    whole = [line for line in lines if line.endswith(b"}")]
    assert len(whole) == 200 - len(answer) + 1
    assert json.loads(lines[-1])["event_id"] == "event-999", "a torn line was joined with the next one"
    os.close(reading)
    os.close(writing)


async def test_a_closed_pipe_costs_no_attempt() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sink = LogSink(None, descriptor=writing)
    await sink.open()

    assert isinstance((await sink.publish([message(1)]))[0], SinkUnavailable)
    os.close(writing)


def _drain(descriptor: int) -> bytes:
    data = b""
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except BlockingIOError:
            return data
        data += piece


async def test_a_call_that_is_cancelled_twice_still_ends_after_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = LogSink(tmp_path / "events.jsonl")
    await sink.open()
    began, end = threading.Event(), threading.Event()

    def write_slowly(*_: Any) -> tuple[int, None]:
        began.set()
        assert end.wait(60)
        return 0, None

    monkeypatch.setattr(sink, "_write_pieces", write_slowly)
    publishing = asyncio.create_task(sink.publish([message(1)]))
    await await_until(began.is_set, what="the thread to write")

    for _ in range(3):
        publishing.cancel()
        for _ in range(5):  # iterations of the event loop
            await asyncio.sleep(0)
        assert not publishing.done(), "the next call could write into the middle of a line"

    end.set()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await sink.close()
