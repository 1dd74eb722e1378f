"""Outboxes: the source of events and the storage of progress.

`outbox_store.py` is the protocol that the delivery uses. The other modules implement it in
Postgres; `tests/support/memory_outbox` implements it with dictionaries, for simulations. Of the packages that a relay
runs, only this one imports psycopg.
"""
