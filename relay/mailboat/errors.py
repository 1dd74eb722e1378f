"""Every error that Mailboat raises on purpose, by what the catcher should do about it.

    MailboatError
    ├── ConfigError           a person wrote something wrong: file, field and remedy are in the message
    │   ├── SecretMissing     a secret that is referred to is not where it should be
    │   ├── NoSuchSink        no package that is installed here has the sink, or its client is missing
    │   └── NotInThisRelease  it is right, and this version can't do it
    ├── SchemaMismatch        the database lacks something Mailboat needs: the message has the SQL that mends it
    ├── EmitRefused           an event that must not enter the outbox (also a ValueError)
    ├── DatabaseUnavailable   Postgres is away or changed under us: drop what is in memory, reconnect, read again
    │   └── InRecovery        the server is a standby
    ├── LeaseLost             somebody else owns this partition now: stop, change nothing
    ├── ForeignDatabase       the cursors belong to another database system (a restored dump): a person must decide
    └── DeliveryError         why an event did not reach its sink
        ├── SinkUnavailable   nobody's fault: back off, count no attempt
        ├── EventRefused      this event's fault: count an attempt, park its key
        └── Undecided         not delivered as far as is known, and not known to be its fault: try again

Vendors' exceptions never cross a module's border: they stay inside as the ``__cause__``. No message ever holds a
password, a token or a payload: errors of ours redact their text, and of a vendor's error only its primary message is
repeated (``mailboat_spec.secrecy``). So logs, ``/status``, ``/readyz``, conditions and the command line show the same.
"""

from __future__ import annotations


class MailboatError(Exception):
    """The root of all errors that Mailboat raises on purpose."""

    def __init__(self, message: str = "") -> None:
        from mailboat_spec.secrecy import (
            redact,
        )  # with all of pydantic: an application that only emits needs none of it

        super().__init__(redact(message))


class ConfigError(MailboatError):
    """Something a person wrote is wrong. The message names the file, the field and what to do."""


class SecretMissing(ConfigError):
    """A secret, or a key of one, that is referred to is not there. The message says where it was looked for."""


class NoSuchSink(ConfigError):
    """A sink, or the client it needs, is not installed where the relay runs. The message says what to install."""


class NotInThisRelease(ConfigError):
    """A manifest asks for what a later version will have."""


class SchemaMismatch(MailboatError):
    """The database is not laid out as Mailboat needs it. The message holds the SQL that mends it."""


class EmitRefused(MailboatError, ValueError):
    """An event that must not enter the outbox, refused where the application can see it."""


class DatabaseUnavailable(MailboatError):
    """Postgres is away, in recovery, or not the server that the cursors were read from."""


class InRecovery(DatabaseUnavailable):
    """The server is a standby: its snapshots leave out running transactions."""


class LeaseLost(MailboatError):
    """Another relay owns the partition by now. Nothing may be settled any more."""


class ForeignDatabase(MailboatError):
    """The cursors were written in another database system. ``mailboat rebase`` continues on request."""


class DeliveryError(MailboatError):
    """Why one event did not reach its sink."""


class SinkUnavailable(DeliveryError):
    """The destination is away (refused connection, time-out, 5xx). Costs no event an attempt."""


class EventRefused(DeliveryError):
    """The destination will not take this event. Costs it an attempt; ``retryable`` says whether more make sense."""

    def __init__(self, message: str, *, reason: str = "Refused", retryable: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


class Undecided(DeliveryError):
    """Not known to be delivered, nor to be at fault: it stood behind, or in one batch with, a failure."""
