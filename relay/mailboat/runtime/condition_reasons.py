"""Machine-readable reasons of errors, used as reason of Kubernetes conditions.

The human-readable text is the message of the error.
"""

from __future__ import annotations

from typing import Final

from mailboat.errors import (
    ConfigError,
    ForeignDatabase,
    InRecovery,
    MailboatError,
    NoSuchSink,
    NotInThisRelease,
    SchemaMismatch,
    SecretMissing,
)
from mailboat_spec import Reason

# The first match wins, so subclasses come before their base class.
_REASONS: Final[tuple[tuple[type[MailboatError], Reason], ...]] = (
    (SecretMissing, Reason.SECRET_NOT_FOUND),
    (NoSuchSink, Reason.SINK_NOT_SUPPORTED),
    (NotInThisRelease, Reason.SINK_NOT_SUPPORTED),
    (ConfigError, Reason.INVALID_SPEC),
    (SchemaMismatch, Reason.SCHEMA_MISMATCH),
    (ForeignDatabase, Reason.FOREIGN_DATABASE),
    (InRecovery, Reason.DATABASE_IN_RECOVERY),
)


def reason_for(error: MailboatError) -> Reason:
    """Return the reason for an error that keeps a relay or a subscription from running."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.DATABASE_UNREACHABLE)
