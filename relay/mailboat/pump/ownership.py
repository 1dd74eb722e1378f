"""Who moves what: each relay decides for itself, from what all of them see.

Every relay computes the same target from the same roster (`mailboat_spec.assignment.balance`) and acts only on its own
part of it: it lets go of what should be another's, and takes what should be its own once nobody holds it. An assignment
from outside goes first, as long as the relay it names is alive. What nobody holds for longer than the grace time is
taken by whoever sees it, so that a disagreement or a missing operator never stops delivery.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from mailboat.outbox.store import CursorKey, Roster
from mailboat_spec.assignment import balance


@dataclass(frozen=True, slots=True)
class Moves:
    """What a relay should do about its partitions now."""

    claim: frozenset[CursorKey]
    release: frozenset[CursorKey]


def targets(roster: Roster) -> dict[CursorKey, str]:
    """Who should move what, as far as anybody alive serves it."""
    alive = {peer.id: peer.serves for peer in roster.peers if peer.alive}
    wanted: dict[CursorKey, str] = {}
    shared: dict[frozenset[str], list[CursorKey]] = defaultdict(list)
    for holding in roster.holdings:
        able = frozenset(relay for relay, serves in alive.items() if holding.key.subscription in serves)
        if holding.assigned_to in able:
            wanted[holding.key] = holding.assigned_to or ""
        elif able:
            shared[able].append(holding.key)
    owners = {h.key: h.owner for h in roster.holdings if h.owner is not None and h.owner in alive}
    for able, keys in shared.items():
        wanted.update(balance(keys, able, {key: owners[key] for key in keys if key in owners}))
    return wanted


def decide(
    me: str, roster: Roster, held: Set[CursorKey], unheld_since: Mapping[CursorKey, float], now: float, grace: float
) -> Moves:
    """Claims and releases for this relay. ``unheld_since``: when each cursor was first seen without a living owner."""
    wanted = targets(roster)
    alive = {peer.id for peer in roster.peers if peer.alive}
    free = {holding.key for holding in roster.holdings if holding.owner is None or holding.owner not in alive}
    served = next((peer.serves for peer in roster.peers if peer.id == me), frozenset())
    claim = {key for key in free if wanted.get(key) == me}
    claim |= {key for key, since in unheld_since.items() if key in free and now - since > grace}
    # Held by an earlier session of ours: nobody else may take it, not even who should, so it is taken to be let go.
    claim |= {holding.key for holding in roster.holdings if holding.owner == me}
    release = {key for key in held if wanted.get(key, me) != me}
    return Moves(frozenset(key for key in claim if key.subscription in served) - held, frozenset(release))
