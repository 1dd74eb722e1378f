"""Settings of the cycle collector for a relay.

A relay allocates a hundred thousand tuples per second that live for milliseconds and contain no cycles. With the
interpreter's defaults the collector scans all of them repeatedly, which cost nearly half of the CPU time per event.
"""

import gc

_YOUNG = 50_000
"""Allocations between scans of the youngest generation: about one batch of every partition."""


def configure_gc() -> None:
    """Configure the collector. Call once, after all long-lived modules are imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 100)
