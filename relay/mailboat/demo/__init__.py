"""``make demo``: a whole day at sea in under a minute, and the proof that nothing was lost.

A real Postgres, a real broker process, an application that writes orders and events, two relays, a consumer. On the way
a relay is killed and an event is refused. What the demo claims at the end is computed from the application's own tables
and from what the consumer got, not from anything a relay says about itself.

`story.py` is what happens; `application.py`, `consumer.py` and `relays.py` are the cast, `scene.py` the servers,
`screen.py` what one sees, `proof.py` the reckoning.
"""
