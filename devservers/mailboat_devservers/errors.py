"""The two failures of a real part, with different consequences.

If a part is not available on this machine, its tests are skipped with a message, except in CI. If an available part
does not start, its tests fail everywhere.
"""

from __future__ import annotations


class PartMissing(Exception):
    """A real part is not available. The message names the requirement and how to get it."""


class ServerFailed(Exception):
    """A server exited after its start or never became ready. The message contains the end of its log."""
