"""Destinations. One file per vendor; each fulfils the protocol in `protocol.py` and passes the one conformance suite."""
