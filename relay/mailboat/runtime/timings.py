"""Intervals and limits of a relay, in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    beat_every: float = 1.0
    lease_ttl: float = 15.0
    """Silence after which other relays take over. The relay itself trusts its leases for two thirds of it
    (``trusted``): the rest is for its calls to sinks to end."""
    overdue_after: float = 3.0
    """Age of the last heartbeat after which a relay whose liveness lock is free counts as dead."""
    grace: float = 10.0
    """Time without an owner after which any relay claims a partition, regardless of the assignment."""
    probe_every: float = 2.0
    deadline: float = 30.0
    """Time after which a database that does not answer counts as unavailable."""
    drain_within: float = 20.0
    """Time that an orderly stop waits for batches in flight."""
    old_snapshot: float = 30.0
    """Age of the oldest snapshot of the database from which leases are renewed."""
    renew_after: int = 200
    """Number of windows of a cursor after which its lease is renewed, while a snapshot of that age is held."""

    @property
    def trusted(self) -> float:
        """Time without a heartbeat after which a relay ends its session and cancels its batches in flight."""
        return self.lease_ttl * 2 / 3
