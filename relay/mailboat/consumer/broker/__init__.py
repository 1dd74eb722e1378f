"""Consumers behind a broker: the engine, its sources, its claim stores and its dead letters.

A source receives messages and hands them to the engine as records. The engine runs the handlers: one event of a key at
a time, many keys at once. A claim store remembers which events are handled, so that an event that is delivered twice
is handled once.

| module | holds |
|---|---|
| ``interfaces`` | the types between engine, source, claim store and dead letters |
| ``engine``, ``engine_state`` | start and end of the tasks, drains; settings and state |
| ``lanes``, ``in_flight`` | which event may start next; where each event is |
| ``claimer``, ``lifecycle``, ``work`` | claims just in time; what follows from a result; one event on its way |
| ``workers``, ``execution``, ``watchdog`` | tasks and threads that run handlers; handlers that block the event loop |
| ``claim_results``, ``dead_letter_queue``, ``availability`` | results for the claim store and dead letters; outages |
| ``kafka_source``, ``pubsub_source`` | the sources |
| ``kafka_client``, ``kafka_access`` | settings of the Kafka client; its errors |
| ``kafka_offsets`` | which offset may be committed |
| ``pubsub_keys``, ``pubsub_stream``, ``pubsub_acks`` | order of a key's messages; the gRPC calls; acknowledgements |
| ``decode`` | a broker's message as an event |
| ``dead_letter_writer`` | an event that can't be handled as a message on the dead-letter topic |
| ``dead_letter_access``, ``replay`` | the dead-letter topic as ``mailboat dlq`` reads it; a replay of its messages |

Claim stores are in ``mailboat.consumer.claims``: Redis and the Postgres inbox.

States of a lane: *ready* (its first event can start) → *claimed* → *handling* → *settled*; or → *parked* (failed, waits
until it is due) → *ready*; or → *dead* (the dead letter is written, then the event is settled).
"""
