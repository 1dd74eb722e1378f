"""The relay's HTTP server for health, status, metrics and assignments; and the client that reads a relay's status.

It reports the runtime's status (`mailboat.runtime.relay_status`) and makes no decisions. The only package that imports
aiohttp.
"""
