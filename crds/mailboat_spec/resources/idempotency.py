"""Idempotency of a consumer: the store that remembers handled events."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from mailboat_spec.base import Model
from mailboat_spec.formats import RedisPrefix
from mailboat_spec.references import Connection, SecretKeyRef
from mailboat_spec.rules import exactly_one
from mailboat_spec.scalars import Duration, between


class OnUnavailable(StrEnum):
    """Policy while the store can't be reached."""

    WAIT = "Wait"
    HANDLE = "Handle"


class IdempotencyRedis(Connection):
    """Redis or Valkey."""

    schemes: ClassVar[tuple[str, ...]] = (
        "rediss",
        "redis",
        "rediss+sentinel",
        "redis+sentinel",
        "rediss+cluster",
        "redis+cluster",
    )

    ca_secret_ref: SecretKeyRef | None = None
    """Key of a Secret that holds the CA certificates of the server in PEM, for URLs with rediss. Default: none, the
    certificates of the system."""
    prefix: RedisPrefix = "mailboat"
    """First part of the keys, which are PREFIX:CONSUMER:EVENT-ID. Default: mailboat."""
    consumer: RedisPrefix | None = None
    """Second part of the keys. Set it to continue with the keys of another helper. Default: none, which means
    NAMESPACE.NAME of this subscription."""
    replicas: int = Field(default=0, strict=True, ge=0, le=5)
    """Replicas that must confirm a write before an event counts as handled, between 0 and 5. Default: 0, none."""


class IdempotencyPostgres(Connection):
    """An inbox table in the database of the handlers' effects."""

    schemes: ClassVar[tuple[str, ...]] = ("postgresql", "postgres")


class Idempotency(Model):
    """Store that recognises events that were handled before. Exactly one of ``redis`` and ``postgres``."""

    constraints = exactly_one(
        "redis",
        "postgres",
        none="needs exactly one of redis and postgres",
        both="has redis and postgres: remove one of them",
    )

    redis: IdempotencyRedis | None = None
    """Redis or Valkey remembers handled events: effects happen at least once, and twice only after a crash between
    effect and mark. Default: none."""
    postgres: IdempotencyPostgres | None = None
    """An inbox table remembers handled events, in the transaction of the handler: effects in that database happen
    exactly once. Default: none."""
    ttl: Annotated[Duration, between("1m", "87600h")] = Duration.parse("720h")
    """How long a handled event is remembered, as a duration between 1m and 87600h. Default: 720h."""
    lease: Annotated[Duration, between("1s", "1h")] = Duration.parse("30s")
    """Time after which the event of a dead consumer is handled by another one, as a duration between 1s and 1h. Leases
    are renewed while handlers run. Default: 30s."""
    on_unavailable: OnUnavailable = OnUnavailable.WAIT
    """What happens while the store can't be reached: Wait (nothing is handled, no attempt is counted) or Handle
    (without detection of duplicates). Default: Wait."""

    @property
    def chosen(self) -> IdempotencyRedis | IdempotencyPostgres:
        """The chosen store."""
        chosen = self.redis or self.postgres
        assert chosen is not None, "validated"
        return chosen
