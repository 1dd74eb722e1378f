"""All errors that Mailboat raises on purpose, grouped by the reaction of the caller.

    MailboatError
    ├── ConfigError           invalid configuration: file, field and remedy are in the message
    │   ├── SecretMissing     a referenced secret does not exist
    │   └── NoSuchSink        no installed package provides the sink, or its client is missing
    ├── SchemaMismatch        the database lacks an object that Mailboat needs: the message has the SQL to fix it
    ├── EmitRefused           an event that must not enter the outbox (also a ValueError)
    ├── DatabaseUnavailable   Postgres is unavailable or was replaced: drop in-memory state, reconnect, read again
    │   └── InRecovery        the server is a standby
    ├── LeaseLost             another relay owns this partition: stop, change nothing
    ├── ForeignDatabase       the cursors belong to another database system (a restored dump): manual decision needed
    └── DeliveryError         an event did not reach its sink
        ├── SinkUnavailable   not caused by the event: back off, count no attempt
        ├── EventRefused      caused by this event: count an attempt, park its key
        └── Undecided         delivery and cause are unknown: retry

Vendors' exceptions never leave their module, except as ``__cause__``. No message ever contains a password, a token or a
payload: Mailboat's errors redact their text, and only the primary message of a vendor's error is repeated
(``mailboat_spec.redaction``). Logs, ``/status``, ``/readyz``, conditions and the command line thus show the same text.
"""


class MailboatError(Exception):
    """Root of all errors that Mailboat raises on purpose."""

    def __init__(self, message: str = "") -> None:
        from mailboat_spec.redaction import redact  # loads pydantic, which an emitting application does not need

        super().__init__(redact(message))


class ConfigError(MailboatError):
    """The configuration is invalid. The message names the file, the field and the remedy."""


class SecretMissing(ConfigError):
    """A referenced secret, or a key of one, does not exist. The message names the searched location."""


class NoSuchSink(ConfigError):
    """A sink, or its client, is not installed in the relay's environment. The message names the package to install."""


class SchemaMismatch(MailboatError):
    """The database schema does not match Mailboat's. The message contains the SQL to fix it."""


class EmitRefused(MailboatError, ValueError):
    """An event must not enter the outbox. Raised in the application's call."""


class DatabaseUnavailable(MailboatError):
    """Postgres is unavailable, in recovery, or not the server that the cursors were read from."""


class InRecovery(DatabaseUnavailable):
    """The server is a standby: its snapshots omit running transactions."""


class LeaseLost(MailboatError):
    """Another relay owns the partition. This relay must not settle any event of it (G5)."""


class ForeignDatabase(MailboatError):
    """The cursors were written in another database system. Run ``mailboat rebase`` to continue."""


class DeliveryError(MailboatError):
    """One event did not reach its sink."""


class SinkUnavailable(DeliveryError):
    """The destination is unavailable (connection refused, timeout, 5xx). No attempt is counted."""


class EventRefused(DeliveryError):
    """The destination refused this event. One attempt is counted; ``retryable`` is false if retries are useless."""

    def __init__(self, message: str, *, reason: str = "Refused", retryable: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


class Undecided(DeliveryError):
    """Delivery and cause are unknown: the event was behind a failed event, or in the same batch."""
