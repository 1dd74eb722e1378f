"""The two ways in which a real part fails to be there, kept apart because they are answered differently.

A part that can't be had on this machine is skipped, loudly, outside of CI. A part that is here and does not start is a
failure everywhere.
"""

from __future__ import annotations


class PartMissing(Exception):
    """A real part can't be had here. The message says what is needed and how to get it."""


class ServerFailed(Exception):
    """A server was started and died, or never became ready. The message holds the end of its log."""
