"""Delivery: moves events from an outbox to a sink. The package depends on the store and sink protocols, not on vendors
or SQL.

The path of an event at the head of the log:

1. The committer (`progress`) runs a tick: the store opens a window and returns its events, routed to partitions.
2. The `partition_worker` takes a batch, sets aside the events of parked keys, and encodes and publishes the rest.
   The next batch is taken while the previous one is in flight.
3. The results are evaluated (`redelivery`): delivered, refused (the key is parked, or the event becomes a dead letter),
   or pending for another attempt.
4. The settlement goes to the committer. The next tick commits the progress of all partitions and polls for new events
   in the same transaction.

If a window is too large for one read, a `window_feeder` reads it in chunks for all partitions that share it. Three
modules are pure functions: `rebalance` (which relay moves which partition), `poll_interval` (when to poll) and
`backoff` (when to retry).
"""
