"""Distribution of partitions: each relay decides for itself from the shared membership.

Every relay computes the same target owners from the same membership (`mailboat_spec.assignment.balance`) and acts only
on its own part: it releases partitions that belong to another relay, and claims its own once they have no owner. An
external assignment takes precedence while the assigned relay is alive. If a partition has no owner for longer than the
grace time, any relay claims it. So neither a disagreement nor a missing operator stops delivery.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from mailboat.store.outbox_store import CursorKey, Membership
from mailboat_spec.assignment import balance


@dataclass(frozen=True, slots=True)
class Moves:
    """Partitions that a relay should claim and release now."""

    claim: frozenset[CursorKey]
    release: frozenset[CursorKey]


def live_relays(membership: Membership) -> set[str]:
    return {peer.id for peer in membership.peers if peer.alive}


def reporter(membership: Membership, number: int) -> str | None:
    """Return the relay that reports the lag of partitions that no relay delivers: the lowest id that serves them."""
    able = (peer.id for peer in membership.peers if peer.alive and not peer.silent and number in peer.serves)
    return min(able, default=None)


def orphans(membership: Membership, me: str, numbers: Set[int]) -> dict[int, frozenset[int]]:
    """Return the partitions of these subscriptions whose owner is silent or missing, if this relay reports them."""
    responsive = {peer.id for peer in membership.peers if peer.alive and not peer.silent}
    found: dict[int, set[int]] = defaultdict(set)
    for holding in membership.holdings:
        if holding.owner not in responsive and holding.key.subscription in numbers:
            found[holding.key.subscription].add(holding.key.partition)
    return {number: frozenset(held) for number, held in found.items() if reporter(membership, number) == me}


def targets(membership: Membership) -> dict[CursorKey, str]:
    """Return the target owner of each partition that a living relay serves."""
    alive = {peer.id: peer.serves for peer in membership.peers if peer.alive}
    target_owners: dict[CursorKey, str] = {}
    shared: dict[frozenset[str], list[CursorKey]] = defaultdict(list)
    for holding in membership.holdings:
        able = frozenset(relay for relay, serves in alive.items() if holding.key.subscription in serves)
        if holding.assigned_to in able:
            target_owners[holding.key] = holding.assigned_to or ""
        elif able:
            shared[able].append(holding.key)
    owners = {h.key: h.owner for h in membership.holdings if h.owner is not None and h.owner in alive}
    for able, keys in shared.items():
        target_owners.update(balance(keys, able, {key: owners[key] for key in keys if key in owners}))
    return target_owners


def decide(
    me: str,
    membership: Membership,
    held: Set[CursorKey],
    unheld_since: Mapping[CursorKey, float],
    now: float,
    grace: float,
) -> Moves:
    """Return claims and releases of this relay. ``unheld_since``: first time a cursor was seen without living owner."""
    target_owners = targets(membership)
    alive = live_relays(membership)
    free = {holding.key for holding in membership.holdings if holding.owner is None or holding.owner not in alive}
    served = next((peer.serves for peer in membership.peers if peer.id == me), frozenset())
    claim = {key for key in free if target_owners.get(key) == me}
    claim |= {key for key, since in unheld_since.items() if key in free and now - since > grace}
    # Owned by an earlier session of this relay: no other relay can claim it, so claim it here to release it if needed.
    claim |= {holding.key for holding in membership.holdings if holding.owner == me}
    release = {key for key in held if target_owners.get(key, me) != me}
    return Moves(frozenset(key for key in claim if key.subscription in served) - held, frozenset(release))
