"""The relay's HTTP side: health, status, metrics, assignments; and the client that reads another relay's status.

It reports what the runtime says about itself (`mailboat.runtime.status`) and decides nothing. The only package that
imports aiohttp.
"""
