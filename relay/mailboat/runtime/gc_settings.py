"""Settings of the cycle collector for a relay.

A relay allocates a hundred thousand tuples per second that live for milliseconds and contain no cycles. With the
interpreter's defaults the collector scans all of them repeatedly, which cost nearly half of the CPU time per event.
"""

import gc


def configure_gc() -> None:
    """Configure the collector. Call once, after all long-lived modules are imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # scan the youngest generation after about one batch of every partition
