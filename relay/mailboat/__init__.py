"""Mailboat: delivers events from a PostgreSQL transactional outbox.

Applications write events with `emit` and `emit_many`, inside their own transaction. They handle events with `Consumer`
and `Event`; handlers may raise `Ignore`, `RetryLater` and `Refuse`. `Kafka`, `PubSub`, `Redis` and `Inbox` configure a
consumer without a manifest. `Once` claims events in Redis for applications with their own loop, and raises
`ClaimHeld`. `migrate` migrates a database. The names for handlers, `Once` and `migrate` are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mailboat.emitter.api import emit, emit_many
from mailboat.emitter.validation import NewEvent
from mailboat.errors import EmitRefused, MailboatError

if TYPE_CHECKING:
    from mailboat.consumer import Consumer, Event, Ignore, Inbox, Kafka, PubSub, Redis, Refuse, RetryLater
    from mailboat.consumer.claims.once import ClaimHeld, Once
    from mailboat.store.schema.migrate import migrate

__all__ = [
    "ClaimHeld",
    "Consumer",
    "EmitRefused",
    "Event",
    "Ignore",
    "Inbox",
    "Kafka",
    "MailboatError",
    "NewEvent",
    "Once",
    "PubSub",
    "Redis",
    "Refuse",
    "RetryLater",
    "emit",
    "emit_many",
    "migrate",
]

_MODULES = {
    "ClaimHeld": "mailboat.consumer.claims.once",
    "Once": "mailboat.consumer.claims.once",
    "migrate": "mailboat.store.schema.migrate",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "mailboat.consumer")), name)
