"""A relay as a process: puts store, sinks and pumps together, connects, reconnects, reports.

`relay.py` is the loop around connected periods, `session.py` one such period, `status.py` what people get to see.
"""
