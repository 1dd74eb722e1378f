"""Outboxes: where events come from and where progress is kept.

`store.py` is the protocol that the pump knows; `memory/` fulfils it in dictionaries, for simulations; the other modules
fulfil it in Postgres. Of all that a relay runs this is the only package that imports psycopg.
"""
