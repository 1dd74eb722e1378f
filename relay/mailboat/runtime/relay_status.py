"""Status of a relay inside its process: the wire model (``mailboat_spec.relay_status``), and values for the metrics.

`reason_for` maps errors to the machine-readable reasons of Kubernetes conditions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mailboat.delivery.histograms import DeliveryHistograms
from mailboat.errors import (
    ConfigError,
    ForeignDatabase,
    InRecovery,
    MailboatError,
    NoSuchSink,
    SchemaMismatch,
    SecretMissing,
)
from mailboat.store.examination import Coverage
from mailboat_spec import Reason, relay_status

# The first match wins, so subclasses come before their base class.
_REASONS: Final[tuple[tuple[type[MailboatError], Reason], ...]] = (
    (SecretMissing, Reason.SECRET_NOT_FOUND),
    (NoSuchSink, Reason.SINK_NOT_SUPPORTED),
    (ConfigError, Reason.INVALID_SPEC),
    (SchemaMismatch, Reason.SCHEMA_MISMATCH),
    (ForeignDatabase, Reason.FOREIGN_DATABASE),
    (InRecovery, Reason.DATABASE_IN_RECOVERY),
)


class RelayState(StrEnum):
    """Life-cycle state of a relay."""

    CONNECTING = "Connecting"
    RUNNING = "Running"
    FAILED = "Failed"
    """A person has to act as described in the message. The relay keeps retrying."""
    STOPPING = "Stopping"


@dataclass(frozen=True, slots=True)
class SubscriptionStatus(relay_status.SubscriptionStatus):
    """One subscription, with its histograms."""

    meters: DeliveryHistograms | None = field(default=None, metadata={"wire": False})
    """Histograms for the metrics."""


@dataclass(frozen=True)
class RelayStatus(relay_status.RelayStatus):
    """One OutboxRelay in one process."""

    subscriptions: tuple[SubscriptionStatus, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    """Events that no filter matches, and filters that match no event. The same in all relays of an outbox."""


def reason_for(error: MailboatError) -> Reason:
    """Return the reason for an error that keeps a relay or a subscription from running."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.DATABASE_UNREACHABLE)
