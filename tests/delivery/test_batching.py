"""Choice of the next batch: no event is skipped or chosen twice, and the batch is as large as its limits allow."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from mailboat.delivery.batching import Limits, choose, total_bytes
from mailboat.model import OutboxEvent

KEYS = ("a", "b", "c")


def event(id: int, key: str | None, payload: bytes | None, headers: str | None = None) -> OutboxEvent:
    number = f"00000000-0000-4000-8000-{id:012d}"
    return OutboxEvent(id, number, "t", None, None, key, payload, "application/json", headers, "{}", None, "", id)


columns = st.tuples(st.sampled_from((None, *KEYS)), st.none() | st.binary(max_size=9), st.none() | st.text(max_size=9))
waiting = st.lists(columns, max_size=12).map(lambda rows: [event(id, *row) for id, row in enumerate(rows, start=1)])
limits = st.builds(Limits, messages=st.integers(1, 12), bytes=st.integers(0, 40), one_per_key=st.booleans())


@given(waiting, st.integers(0, 12), limits, st.sets(st.sampled_from(KEYS)))
@example([event(1, "a", b"12345")], 0, Limits(10, 4, one_per_key=False), set())
def test_a_batch_is_the_next_events_that_fit(
    events: list[OutboxEvent], start: int, limits: Limits, parked: set[str]
) -> None:
    start = min(start, len(events))
    chosen = choose(events, start, limits, parked, total_bytes(events))
    assert sorted([*chosen.sent, *chosen.aside]) == list(range(start, chosen.end)), "nothing skipped, nothing twice"
    assert list(chosen.sent) == sorted(chosen.sent)
    assert all(events[index].key in parked for index in chosen.aside)
    assert not any(events[index].key in parked for index in chosen.sent)
    assert _allowed(events, chosen.sent, limits)
    if chosen.end < len(events):
        one_more = [*chosen.sent, chosen.end]
        assert events[chosen.end].key not in parked
        assert not _allowed(events, one_more, limits), "it could have been larger"


def _allowed(events: list[OutboxEvent], sent: Sequence[int], limits: Limits) -> bool:
    """Repeat the rules: limits of messages and bytes (a single event may exceed them), and optionally one per key."""
    keys = [events[index].key for index in sent if events[index].key is not None]
    return (
        len(sent) <= limits.messages
        and (len(sent) < 2 or total_bytes([events[index] for index in sent]) <= limits.bytes)
        and not (limits.one_per_key and len(keys) > len(set(keys)))
    )
