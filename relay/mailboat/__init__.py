"""Mailboat: carries a PostgreSQL transactional outbox to the outside world.

An application needs two names of it, inside its own transaction: `emit` and `emit_many`.
"""

from mailboat.emitting import emit, emit_many
from mailboat.errors import EmitRefused, MailboatError
from mailboat.newevent import NewEvent

__all__ = ["EmitRefused", "MailboatError", "NewEvent", "emit", "emit_many"]
