"""Outboxes: where events come from and where progress is kept.

`store.py` is the protocol that the pump knows; `memory.py` fulfils it in a dictionary, for simulations; the other
modules fulfil it in Postgres. This is the only package that imports psycopg.
"""
