"""``make demo``: delivery with failures in under a minute, and the proof that no event was lost.

The demo runs a real Postgres, a real broker process, an application that writes orders and events, two relays and a
consumer. Meanwhile a relay is killed and an event is refused. The result is computed from the application's own tables
and the messages of the consumer, not from the status of a relay.

`scenario.py` has the sequence of steps, `application.py`, `consumer.py` and `relays.py` the processes, `servers.py` the
servers, `screen.py` the output, `verification.py` the comparison.
"""
