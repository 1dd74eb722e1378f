"""A registered function: the event types it handles, and the source of each argument.

Arguments are matched by annotation, so all of them are optional: ``Event`` (in a batch handler ``list[Event]``), the
open transaction (``psycopg.Connection``, SQLAlchemy's ``Session`` and similar), and one other type, to which the
payload is decoded.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_args, get_origin, get_type_hints

from mailboat.consumer.payloads import Decode, decoder
from mailboat.consumer.received_event import Event
from mailboat.errors import ConfigError
from mailboat_spec import Pattern


class TransactionKind(Enum):
    """Type of the open transaction that is passed to a handler."""

    PSYCOPG = "psycopg.Connection"
    PSYCOPG_ASYNC = "psycopg.AsyncConnection"
    SQLALCHEMY = "sqlalchemy.Connection"
    SQLALCHEMY_SESSION = "sqlalchemy.orm.Session"
    SQLALCHEMY_ASYNC = "sqlalchemy.ext.asyncio.AsyncConnection"
    SQLALCHEMY_ASYNC_SESSION = "sqlalchemy.ext.asyncio.AsyncSession"

    @property
    def is_async(self) -> bool:
        return "Async" in self.value

    @property
    def vendor(self) -> str:
        return self.value.partition(".")[0]


_TRANSACTIONS: Final = {(kind.vendor, kind.value.rpartition(".")[2]): kind for kind in TransactionKind}


@dataclass(frozen=True, slots=True)
class Handler:
    """One function and its arguments."""

    pattern: Pattern
    function: Callable[..., Any]
    name: str
    is_async: bool
    is_batch: bool
    event: str | None
    """Name of the parameter for the event or the list of events; None without one. Likewise for the next two fields."""
    transaction: str | None
    payload: str | None
    transaction_kind: TransactionKind | None
    decode: Decode | None

    def arguments(self, event: Event | Sequence[Event], payload: Any, transaction: Any) -> dict[str, Any]:
        """Return the keyword arguments for the function."""
        found: dict[str, Any] = {}
        if self.event is not None:
            found[self.event] = event
        if self.payload is not None:
            found[self.payload] = payload
        if self.transaction is not None:
            found[self.transaction] = transaction
        return found


def handler(pattern: str, function: Callable[..., Any], *, batch: bool = False) -> Handler:
    """Inspect a function and return its handler. Raises ``ConfigError`` if an argument is ambiguous or unsupported."""
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    found: dict[str, str] = {}
    kind: TransactionKind | None = None
    decode: Decode | None = None
    target = _target(function)
    is_async = inspect.iscoroutinefunction(target)
    for parameter, annotation in _annotations(name, target).items():
        if annotation is Event or (get_origin(annotation) in (list, Sequence) and get_args(annotation) == (Event,)):
            role = "event"
            if (annotation is Event) == batch:
                raise ConfigError(
                    f"handler {name}: a {'batch' if batch else 'single'} handler gets"
                    f" {'list[Event]' if batch else 'Event'}, not {annotation}"
                )
        elif (transaction := _transaction(annotation)) is not None:
            role, kind = "transaction", transaction
        elif batch:
            raise ConfigError(f"handler {name}: {parameter}: a batch handler gets list[Event] and the transaction only")
        else:
            role, decode = "payload", decoder(annotation)
        if role in found:
            raise ConfigError(f"handler {name}: {parameter} and {found[role]} would both get the {role}: keep one")
        found[role] = parameter
    if kind is not None and kind.is_async != is_async:
        raise ConfigError(
            f"handler {name} is {'' if is_async else 'not '}async, and {kind.value} is"
            f" {'' if kind.is_async else 'not '}: use the same for both"
        )
    roles = (found.get("event"), found.get("transaction"), found.get("payload"))
    return Handler(Pattern(pattern), function, name, is_async, batch, *roles, kind, decode)


def _target(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself or, for a callable object, its ``__call__``."""
    if inspect.isfunction(function) or inspect.ismethod(function):
        return function
    called: Callable[..., Any] = type(function).__call__.__get__(function)
    return called


def _annotations(name: str, target: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = get_type_hints(target)
    except NameError as error:
        raise ConfigError(
            f"handler {name}: {error}. Its annotations must be importable when the program runs."
        ) from error
    parameters = [
        p for p in inspect.signature(target).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    unknown = [p.name for p in parameters if p.name not in hints and p.default is p.empty]
    if unknown:
        raise ConfigError(f"handler {name}: {', '.join(unknown)} has no annotation: its value is found by it")
    return {p.name: hints[p.name] for p in parameters if p.name in hints}


def _transaction(annotation: Any) -> TransactionKind | None:
    """Return the transaction kind by class name and package, so that no driver is imported here."""
    for cls in getattr(get_origin(annotation) or annotation, "__mro__", ()):
        kind = _TRANSACTIONS.get((cls.__module__.partition(".")[0], cls.__name__))
        if kind is not None:
            return kind
    return None
