"""Watermill's SQL Pub/Sub as a peer of the relay: a Go program that forwards its table to Kafka."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from setup import PAYLOAD_BYTES, Stage

from mailboat_devservers.golang import built_program
from mailboat_devservers.processes import Child

NAME = "watermill-sql"
ID_HEADER = "_watermill_message_uuid"
_PAYLOAD = '"' + "x" * (PAYLOAD_BYTES - 2) + '"'
_INSERT = sql.SQL(
    "insert into {table} (uuid, payload, metadata, transaction_id)"
    " values (%s, %s, jsonb_build_object('key', %s::text), pg_current_xact_id())"
)


def program() -> str:
    """Return the path of the forwarder, built on first use. Raise ``PartMissing`` if that fails."""
    return str(built_program("watermill"))


def start(stage: Stage, url: str, topic: str) -> Child:
    """Start a forwarder from a table to its topic. The forwarder is ready when its tables exist."""

    def initialised() -> bool:
        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute("select to_regclass(%s)", [f"public.watermill_offsets_{topic}"]).fetchone()
        return row is not None and row[0] is not None

    command = [program(), f"{url}?sslmode=disable", stage.broker.bootstrap, topic]
    forwarder = Child(NAME, command, log=stage.folder / f"{topic}.log", ready=initialised)
    forwarder.launch()
    return forwarder


def insert(topic: str, connection: psycopg.Connection, key: str) -> UUID:
    event = uuid4()
    statement = _INSERT.format(table=sql.Identifier("public", f"watermill_{topic}"))
    connection.execute(statement, [str(event), _PAYLOAD, key])
    return event
