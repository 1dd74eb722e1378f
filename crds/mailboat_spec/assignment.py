"""Assignment of partitions to workers: the body of ``PUT /assignment``, and the balanced, sticky computation of one.

Standalone relays use this module to divide partitions among themselves, the operator to divide them among pods. It is
pure: the same partitions, workers and current owners always give the same result, in any order of the arguments.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

_Name = Annotated[str, Field(min_length=1, max_length=512, strict=True)]
_Owners = Annotated[Mapping[Annotated[int, Field(ge=0, le=255)], _Name], Field(min_length=1)]

Partition = TypeVar("Partition", bound=tuple[Any, int])
"""Pair of a stream (any value with equality and ``repr``) and the number of the partition."""


class AssignmentRequest(BaseModel):
    """Body of ``PUT /assignment``: desired owner (id of a relay) per partition and subscription.

    A relay refuses a generation older than its current one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
    subscriptions: Mapping[_Name, _Owners]


def balance(
    partitions: Collection[Partition], workers: Collection[str], owners: Mapping[Partition, str]
) -> dict[Partition, str]:
    """Return an owner for every partition; empty if there are no workers.

    - The numbers of partitions per worker differ by at most one.
    - A partition stays with its owner unless that would break the first rule: the number of moves is minimal.
    - Among workers with room, a partition goes to the one with the fewest partitions of its stream, which spreads
      streams.
    """
    if not workers:
        return {}
    base, extra = divmod(len(partitions), len(workers))
    assigned: dict[str, list[Partition]] = {worker: [] for worker in workers}
    unassigned: list[Partition] = []
    for partition in sorted(partitions, key=repr):
        assigned.get(owners.get(partition, ""), unassigned).append(partition)

    # The `extra` workers with one more partition are those that hold most already: this avoids needless moves.
    fullest = sorted(assigned, key=lambda worker: (-len(assigned[worker]), worker))
    quota = {worker: base + (1 if rank < extra else 0) for rank, worker in enumerate(fullest)}
    for worker, owned in assigned.items():
        for _ in range(len(owned) - quota[worker]):  # from the streams with the most partitions first
            streams = Counter(stream for stream, _ in owned)
            crowded = max(range(len(owned)), key=lambda index: (streams[owned[index][0]], index))
            unassigned.append(owned.pop(crowded))

    of_stream = Counter((worker, stream) for worker, owned in assigned.items() for stream, _ in owned)
    for partition in sorted(unassigned, key=repr):
        stream = partition[0]
        room = [worker for worker in assigned if len(assigned[worker]) < quota[worker]]
        chosen = min(room, key=lambda worker: (of_stream[worker, stream], len(assigned[worker]), _mix(worker, stream)))
        assigned[chosen].append(partition)
        of_stream[chosen, stream] += 1
    return {partition: worker for worker, owned in assigned.items() for partition in owned}


def _mix(worker: str, stream: Any) -> bytes:
    """Return a sort key that gives every stream a different but stable order of workers."""
    return hashlib.sha256(f"{worker}\x00{stream!r}".encode()).digest()
