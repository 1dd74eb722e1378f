"""docs/dead-letters.md against the code: the example document, and the headers in the tables."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import cast

from mailboat.consumer.broker.dead_letter_writer import DeadLetterFormat, forms
from mailboat.consumer.broker.envelope import CONTENT_TYPE, envelope
from mailboat.consumer.broker.replay import Letter, replay_message
from mailboat.consumer.handler_outcomes import Refusal
from support.broker_messages import KAFKA, dead
from support.markdown import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "dead-letters.md").read_text(encoding="utf-8")
(SHOWN,) = map(json.loads, blocks(PAGE, "json"))


def test_the_document_equals_that_of_a_consumer() -> None:
    source = SHOWN["source"]
    original = replace(
        KAFKA,
        timestamp=datetime.fromisoformat(source["timestamp"]),
        value=json.dumps(SHOWN["originalEvent"]["data"]).encode(),
        headers=tuple((name, value.encode()) for name, value in source["headers"].items()),
    )
    letter = dead(original, Refusal(SHOWN["reason"], SHOWN["error"]))

    written = envelope(replace(letter, failed_at=datetime.fromisoformat(SHOWN["failedAt"])))

    assert json.loads(written) == SHOWN
    assert list(json.loads(written)["originalEvent"]) == list(SHOWN["originalEvent"])


def test_the_tables_name_every_header() -> None:
    named = set(re.findall(r"`((?:mailboat-(?:dead|replay)|kafka_dlt)-[a-z-]+|mailboat-replay)`", PAGE))
    written = list(forms(dead(KAFKA), DeadLetterFormat.ENVELOPE, spring=True))
    letter = Letter.of(replace(KAFKA, value=written[0].value, headers=written[0].headers))
    assert letter is not None
    replayed = cast("list[tuple[str, bytes]]", replay_message(letter, "shop/billing").headers)

    assert named == {name for form in written for name, _ in form.headers} - {"event_id", "content-type"} | {
        name for name, _ in replayed
    }
    assert CONTENT_TYPE in PAGE
