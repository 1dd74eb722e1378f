"""What relays say about themselves on ``GET /status``, read leniently: a relay may be older or newer than the operator.

The relay's side of it is ``mailboat.runtime.status``; the two packages never import one another, so the words are
written down here a second time, and a test with real relays holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, ValidationError

from mailboat_spec import Reason, StatusModel


def reason_given(word: str, otherwise: Reason) -> Reason:
    """A relay's reason for programs; one of another version may use words that are not known here."""
    try:
        return Reason(word)
    except ValueError:
        return otherwise


class PartitionReport(StatusModel):
    """A partition that the reporting relay owns."""

    partition: int
    lag: int = 0
    lag_bounded: bool = False
    oldest_age: float | None = None
    parked: int = 0
    last_error: str | None = None


class SubscriptionReport(StatusModel):
    """A subscription, as far as the reporting relay moves it."""

    name: str
    sink: str = ""
    state: str = "Running"
    """Running, Paused, or Failed: it can't be built, and ``last_error`` says why."""
    dead: int = 0
    published: int = 0
    blocked: int = 0
    """Keys that stand still."""
    rate: float = 0.0
    sink_reachable: bool = True
    last_error: str | None = None
    reason: str = ""
    owned: tuple[PartitionReport, ...] = ()
    owners: dict[int, str | None] = Field(default_factory=dict)


class RelayReport(StatusModel):
    """One OutboxRelay in the reporting process."""

    name: str
    relay: str = ""
    state: str = ""
    message: str = ""
    reason: str = ""
    database_reachable: bool = False
    schema_ready: bool = False
    partitions_ahead_days: float | None = None
    retention_blocked: str | None = None
    subscriptions: tuple[SubscriptionReport, ...] = ()

    def subscription(self, name: str) -> SubscriptionReport | None:
        return next((each for each in self.subscriptions if each.name == name), None)


class ConfigReport(StatusModel):
    """Which configuration is in use, and what was wrong with the last one."""

    version: int | None = None
    error: str | None = None


class Report(StatusModel):
    """A whole answer."""

    relays: tuple[RelayReport, ...] = ()
    config: ConfigReport = Field(default_factory=ConfigReport)
    secrets: dict[str, str] = Field(default_factory=dict)

    def relay(self, name: str) -> RelayReport | None:
        return next((each for each in self.relays if each.name == name), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one relay pod said last, or why it said nothing."""

    pod: str
    report: Report | None
    error: str = ""


def read_report(document: object) -> Report | None:
    """None for what is no status of a relay."""
    try:
        return Report.model_validate(document)
    except ValidationError:
        return None
