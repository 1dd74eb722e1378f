"""Destinations. One place per vendor; each fulfils ``protocol.py`` and passes the one suite in ``tests/sinks``."""
