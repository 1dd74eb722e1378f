"""All errors that Mailboat raises on purpose, grouped by the reaction of the caller.

Vendors' exceptions never leave their module, except as ``__cause__``. No message ever contains a password, a token or a
payload: Mailboat's errors redact their text, and only the primary message of a vendor's error is repeated
(``mailboat_spec.redaction``). Logs, ``/status``, ``/readyz``, conditions and the command line thus show the same text.
"""


class MailboatError(Exception):
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
    """Postgres is unavailable, in recovery, or was replaced. The caller drops its state, reconnects and reads again."""


class InRecovery(DatabaseUnavailable):
    """The server is a standby: its snapshots omit running transactions."""


class LeaseLost(MailboatError):
    """Another relay owns the partition. This relay must not settle any event of it (G5)."""


class ForeignDatabase(MailboatError):
    """The cursors belong to another database system (a restored dump). To continue, run ``mailboat rebase``."""


class DeliveryError(MailboatError):
    """One event did not reach its sink."""


class SinkUnavailable(DeliveryError):
    """The destination is unavailable (connection refused, timeout, 5xx): back off. No attempt is counted."""


class EventRefused(DeliveryError):
    """This event was refused: an attempt is counted. ``retryable`` is false if further ones are useless."""

    def __init__(self, message: str, *, reason: str = "Refused", retryable: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


class Undecided(DeliveryError):
    """Delivery and cause are unknown (the event was behind a failed event, or in the same batch): retry."""
