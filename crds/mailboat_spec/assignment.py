"""Who should move which partition: balanced, sticky, and the same answer for everybody who asks.

Relays that stand alone use it to share work among themselves, the operator to share work among pods. It is pure: the
same partitions, workers and present owners always give the same answer, in any order of the arguments.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

Partition = TypeVar("Partition", bound=tuple[Any, int])
"""A pair of the stream (anything that can be compared for equality and printed) and the number of the partition."""


def balance(
    partitions: Collection[Partition], workers: Collection[str], owners: Mapping[Partition, str]
) -> dict[Partition, str]:
    """An owner for every partition, or nothing if there are no workers.

    - Every worker gets the same number, give or take one.
    - A partition stays with its owner unless that would break the first rule: no more moves than must be.
    - Among workers with equally many, a stream goes where it has the fewest partitions, so that streams spread too.
    """
    if not workers:
        return {}
    base, extra = divmod(len(partitions), len(workers))
    ordered = sorted(partitions, key=repr)
    held: dict[str, list[Partition]] = {worker: [] for worker in workers}
    homeless: list[Partition] = []
    for partition in ordered:
        held.get(owners.get(partition, ""), homeless).append(partition)

    # The `extra` workers that may hold one more are those that hold most already: moving from them would be needless.
    fullest = sorted(held, key=lambda worker: (-len(held[worker]), worker))
    quota = {worker: base + (1 if rank < extra else 0) for rank, worker in enumerate(fullest)}
    for worker, mine in held.items():
        surplus = len(mine) - quota[worker]
        if surplus > 0:
            homeless += _least_welcome(mine, surplus)

    of_stream: Counter[tuple[str, Any]] = Counter()
    for worker, mine in held.items():
        of_stream.update((worker, stream) for stream, _ in mine)
    for partition in sorted(homeless, key=repr):
        stream = partition[0]
        room = [worker for worker in held if len(held[worker]) < quota[worker]]
        chosen = min(room, key=lambda worker: (of_stream[worker, stream], len(held[worker]), _mix(worker, stream)))
        held[chosen].append(partition)
        of_stream[chosen, stream] += 1
    return {partition: worker for worker, mine in held.items() for partition in mine}


def _least_welcome(mine: list[Partition], count: int) -> list[Partition]:
    """Takes ``count`` partitions out of ``mine``, from the streams that it has most of."""
    taken = []
    for _ in range(count):
        streams = Counter(stream for stream, _ in mine)
        crowded = max(range(len(mine)), key=lambda index: (streams[mine[index][0]], index))
        taken.append(mine.pop(crowded))
    return taken


def _mix(worker: str, stream: Any) -> bytes:
    """A different but stable order of workers for every stream."""
    return hashlib.sha256(f"{worker}\x00{stream!r}".encode()).digest()
