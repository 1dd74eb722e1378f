"""``--assignment``: a file with an assignment, watched for changes and applied like the HTTP call."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from mailboat.errors import ConfigError, MailboatError
from mailboat.http.assignment import LARGEST, Assign, follow, parse
from mailboat.runtime.watching import LOOK_EVERY, watch

log = logging.getLogger("mailboat.assignment")


async def follow_file(path: Path, assign: Assign, *, every: float = LOOK_EVERY) -> None:
    """Watch the file until cancelled. A missing or invalid file is logged once and read again after a change."""

    async def changed() -> None:
        told = ""
        while True:
            try:
                await _follow(path, assign)
                return
            except (ConfigError, OSError) as error:
                log.error("The assignment file can't be used: %s", error, extra={"file": str(path)})
                return
            except MailboatError as error:  # the database is unavailable: retry the same file
                if told != str(error):
                    log.warning("The assignment waits: %s", error, extra={"file": str(path)})
                told = str(error)
            await asyncio.sleep(every)

    await watch([path], changed, every=every)


async def _follow(path: Path, assign: Assign) -> None:
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ConfigError(f"{path} is larger than 1 MiB")
    assignment = parse(text, str(path))
    outcome = await follow(assignment, assign)
    level = logging.INFO if outcome.followed else logging.WARNING
    fields = {"accepted": outcome.accepted, "stale": outcome.stale, "unknown": outcome.unknown}
    log.log(level, "An assignment was read.", extra={"file": str(path), "generation": assignment.generation, **fields})
