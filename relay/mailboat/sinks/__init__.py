"""Sinks, one module or package per vendor. Each implements ``protocol.py`` and passes the suite in ``tests/sinks``."""
