"""Printer columns of both kinds for ``kubectl get``, in reading order: health, destination, lag, reason of a failure.

Wide columns are printed by ``-o wide`` only. A column is one path into the object. Values that need arithmetic
(``1/2``, ``100000+``) are therefore status fields that the operator writes for this purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mailboat_spec.conditions import ConditionType


@dataclass(frozen=True, slots=True)
class Column:
    """One printer column. kubectl prints the name in capitals."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    description: str = ""

    def as_schema(self) -> dict[str, object]:
        """Return the column as an entry of ``additionalPrinterColumns``."""
        written: dict[str, object] = {"name": self.name, "type": self.type, "jsonPath": self.path}
        if self.description:
            written["description"] = self.description
        if self.wide:
            written["priority"] = 1
        return written


def _of_ready(field: str) -> str:
    return f'.status.conditions[?(@.type=="{ConditionType.READY}")].{field}'


_READY: Final = Column("Ready", _of_ready("status"), description="Whether all that the spec asks for is there.")
_STATUS: Final = Column("Status", _of_ready("reason"), description="Why it is ready or not, in one word.")
_AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")

RELAY_COLUMNS: Final = (
    _READY,
    Column("Runtime", ".spec.runtime", description="Where relays run."),
    Column("Replicas", ".status.replicasDisplay", description="Relays that are ready out of those that are wanted."),
    Column("Subscriptions", ".status.subscriptions", "integer", description="Subscriptions that refer to it."),
    _STATUS,
    _AGE,
    Column("Table", ".spec.outbox.table", wide=True, description="The outbox."),
)

SUBSCRIPTION_COLUMNS: Final = (
    _READY,
    Column("Source", ".status.source", description="Kind and name of what is read."),
    Column("Sink", ".status.sink", description="The kind of destination."),
    Column("Partitions", ".status.partitionCount", "integer", description="Slices that are moved independently."),
    Column("Lag", ".status.lagDisplay", description="Matching events not yet settled."),
    Column("Oldest", ".status.oldestAge", description="Age of the oldest of them."),
    Column("Dead", ".status.dead", "integer", description="Dead letters not yet replayed."),
    _STATUS,
    _AGE,
    Column("Parked", ".status.parked", "integer", wide=True, description="Events waiting for their next attempt."),
    Column("Rate", ".status.rate", "number", wide=True, description="Events published per second."),
    Column("Error Age", ".status.lastErrorTime", "date", wide=True, description="Time since the last failure."),
    Column("Last Error", ".status.lastError", wide=True, description="The last failure."),
)
