"""Outboxes: the source of events and the storage of progress.

`store.py` is the protocol that the pump uses. `memory/` implements it with dictionaries, for simulations. The other
modules implement it in Postgres. Of the packages that a relay runs, only this one imports psycopg.
"""
