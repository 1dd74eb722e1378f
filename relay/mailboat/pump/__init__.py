"""The pump: moves events from an outbox to a sink. It knows no vendor and no SQL, only the two protocols.

The life of an event at the tip of the log:

1. The `keeper` ticks: the store opens a window and hands out its events, routed to partitions.
2. The partition's `pump` takes a batch: what belongs to a parked key is set aside, the rest is encoded and handed to
   the sink; the next batch is taken while the sink still answers for the last one.
3. The answers are judged (`verdicts`): delivered, refused (its key is parked, or it is dead), or to be tried again.
4. A settlement goes to the keeper, which writes all partitions' progress in its next tick, and looks for new events
   in the same transaction.

A window too large for one read is walked by a `reader`, which feeds all partitions that share it. `ownership` decides
who moves what, `rhythm` when to look again, `retry` when to try again: pure functions all three.
"""
