"""Filter of a subscription with a source: events that do not match are settled without being handled."""

from collections.abc import Iterable

from mailboat.consumer.broker.interfaces import Receiver, Record, Source, SourceState
from mailboat_spec import Filter


def matches(filter_: Filter, record: Record) -> bool:
    """Return whether the consumer handles the record. One that can't be decoded has no type: it is handled, and becomes
    a dead letter."""
    event = record.event
    if record.cannot_decode is not None:
        return True
    types, aggregates = filter_.event_types, filter_.aggregate_types
    return (not types or any(each.matches(event.type) for each in types)) and (
        not aggregates or any(each.matches(event.aggregate_type or "") for each in aggregates)
    )


class FilteredSource:
    """A source that delivers only matching records. Implements ``Source``, and ``Receiver`` for the inner source."""

    def __init__(self, source: Source, filter_: Filter) -> None:
        self._source = source
        self._filter = filter_
        self._receiver: Receiver | None = None
        self.passed_over = 0

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        await self._source.start(self)

    def settle(self, record: Record) -> None:
        self._source.settle(record)

    def release(self, record: Record) -> None:
        self._source.release(record)

    def state(self) -> SourceState:
        return self._source.state()

    async def stop(self) -> None:
        await self._source.stop()

    def take(self, records: Iterable[Record]) -> None:
        assert self._receiver is not None, "started"
        matching = []
        for record in records:
            if matches(self._filter, record):
                matching.append(record)
            else:
                self._source.settle(record)
                self.passed_over += 1
        if matching:
            self._receiver.take(matching)

    async def revoke(self, partitions: Iterable[int], within: float) -> None:
        assert self._receiver is not None, "started"
        await self._receiver.revoke(partitions, within)

    def lose(self, partitions: Iterable[int]) -> None:
        assert self._receiver is not None, "started"
        self._receiver.lose(partitions)
