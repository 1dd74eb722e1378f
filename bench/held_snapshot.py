"""Latency and insert cost beside a snapshot that keeps the former versions of cursors.

Another session holds a snapshot. A procedure makes versions of each cursor, one transaction each. Then events are
written until the relay has renewed its leases, which it does while it works, and the measurement is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import latency
import psycopg
import rates
from setup import Relay, Stage

from mailboat_devservers.errors import ServerFailed

RATE = 100
VERSIONS = 10_000
"""Versions of a cursor that are made: the time that this takes grows with the square of the number."""
_INSERTS = 500
_PATIENCE = 240.0
_MAKE_VERSIONS = """
    create procedure public.make_versions(versions integer) language plpgsql as $$
    declare
        place tid;
        places tid[] := array(select ctid from mailboat.cursors);
    begin
        for n in 1..versions loop
            for i in 1..array_length(places, 1) loop
                update mailboat.cursors set position = position where ctid = places[i] returning ctid into place;
                if not found then
                    raise exception 'the relay moved a cursor';
                end if;
                places[i] := place;
            end loop;
            commit;
        end loop;
    end
    $$"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Latency of delivery, and the duration of an insert with its commit, in milliseconds."""

    p50: float
    p99: float
    insert: float
    postgres_cpu: float
    """Microseconds per event."""


def measure(stage: Stage, seconds: float, versions: int = VERSIONS) -> Iterator[Figures]:
    """Yield the figures without a held snapshot, with one before the leases are renewed, and after it."""
    url, topic = stage.new_database("held_snapshot"), stage.new_topic("held-snapshot")
    with Relay(stage, url, topic) as relay, psycopg.connect(url, autocommit=True) as connection:
        rates.until_owned([relay])
        connection.execute(_MAKE_VERSIONS)
        yield _figures(stage, relay, url, topic, seconds)
        with psycopg.connect(url) as holder:
            holder.execute("set transaction isolation level repeatable read")
            holder.execute("select from mailboat.cursors")
            epochs = _epochs(connection)
            time.sleep(3.0)  # the relay stores the progress of idle cursors
            connection.execute("set synchronous_commit = off")
            connection.execute("call public.make_versions(%s)", (versions,))
            yield _figures(stage, relay, url, topic, seconds)
            _write_until_renewed(url, connection, epochs)
            yield _figures(stage, relay, url, topic, seconds)


def _figures(stage: Stage, relay: Relay, url: str, topic: str, seconds: float) -> Figures:
    row = rates.steady(stage, [relay], rates.Traffic(url, [topic]), rates.Case(RATE), seconds)
    assert row.latency is not None
    with psycopg.connect(url) as connection:
        began = time.perf_counter()
        for number in range(_INSERTS):
            latency.emit(connection, f"order-{number}")
            connection.commit()
        insert = (time.perf_counter() - began) / _INSERTS
    p50, p99 = (row.latency.percentile(share) * 1e3 for share in (0.5, 0.99))
    return Figures(p50, p99, insert * 1e3, row.cost.postgres / row.per * 1e6)


def _epochs(connection: psycopg.Connection) -> set[object]:
    return {epoch for (epoch,) in connection.execute("select epoch from mailboat.cursors").fetchall()}


def _write_until_renewed(url: str, connection: psycopg.Connection, epochs: set[object]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while _epochs(connection) & epochs:
        if time.monotonic() > deadline:
            raise ServerFailed("the relay did not renew its leases")
        latency.write(url, RATE, 5.0)
