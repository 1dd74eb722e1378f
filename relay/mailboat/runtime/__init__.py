"""The relay process: combines store, sinks and pumps, connects, reconnects and reports.

`relay.py` is the loop around connected periods, `session.py` one such period, `relay_status.py` the reported status.
"""
