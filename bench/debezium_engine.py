"""Debezium as a peer of the relay: its embedded engine with the outbox router, in a separate process.

The jars come from Maven.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
from psycopg.conninfo import conninfo_to_dict
from setup import PAYLOAD_BYTES, Stage

from mailboat_devservers.cache import made_once
from mailboat_devservers.errors import PartMissing
from mailboat_devservers.maven import copy_with_dependencies
from mailboat_devservers.processes import Child

NAME = "Debezium, embedded engine"
_SOURCES = Path(__file__).with_name("debezium")
_PAYLOAD = "x" * PAYLOAD_BYTES
_TABLE = """
create table public.outbox (
    id uuid primary key, aggregatetype text not null, aggregateid text not null, type text not null, payload text)
"""
_INSERT = "insert into public.outbox (id, aggregatetype, aggregateid, type, payload) values (%s, %s, %s, %s, %s)"
_FILL_PROCEDURE = """
create procedure public.fill_outbox(topic text, payload text, events integer, per_transaction integer)
language plpgsql as $$
begin
    for n in 1..events loop
        insert into public.outbox values (gen_random_uuid(), topic, 'order-' || n % 10000, 'order.placed', payload);
        if n % per_transaction = 0 then
            commit;
        end if;
    end loop;
end
$$
"""
_PROPERTIES = """\
name=bench
connector.class=io.debezium.connector.postgresql.PostgresConnector
offset.storage=org.apache.kafka.connect.storage.FileOffsetBackingStore
offset.storage.file.filename={offsets}
offset.flush.interval.ms=1000
database.hostname={host}
database.port={port}
database.user={user}
database.password=unused
database.dbname={dbname}
topic.prefix=debezium
plugin.name=pgoutput
slot.name={slot}
publication.name={slot}
publication.autocreate.mode=filtered
table.include.list=public.outbox
snapshot.mode=no_data
tombstones.on.delete=false
poll.interval.ms={poll_interval}
transforms=outbox
transforms.outbox.type=io.debezium.transforms.outbox.EventRouter
transforms.outbox.route.topic.replacement=${{routedByValue}}
"""


def program() -> Path:
    """Return the folder with the jars and the compiled program, made on first use.

    Raise ``PartMissing`` if that fails.
    """
    compiler = shutil.which("javac")
    if compiler is None or shutil.which("java") is None:
        raise PartMissing("Debezium needs a JDK 17 or newer, and there is no javac on the PATH")

    def make(folder: Path) -> None:
        copy_with_dependencies(_SOURCES / "pom.xml", folder / "jars")
        done = subprocess.run(
            [compiler, "-cp", f"{folder}/jars/*", "-d", str(folder / "classes"), str(_SOURCES / "Relay.java")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise PartMissing(f"the program around Debezium's engine can't be compiled:\n{done.stdout[:500]}")

    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(_SOURCES.iterdir()))).hexdigest()[:16]
    return made_once(f"debezium-{digest}", make)


def create_table(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_TABLE)


def fill(url: str, topic: str, events: int, per_transaction: int) -> None:
    """Write a backlog in transactions of so many rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        connection.execute(_FILL_PROCEDURE)
        connection.execute("call public.fill_outbox(%s, %s, %s, %s)", [topic, _PAYLOAD, events, per_transaction])


def start(stage: Stage, url: str, poll_interval: int = 5) -> Child:
    """Start an engine that sends the rows of the table to topics. The engine is ready when its slot is active."""
    where = conninfo_to_dict(url)
    slot = f"slot_{where['dbname']}"
    properties = stage.folder / f"{slot}.properties"
    properties.write_text(
        _PROPERTIES.format(
            offsets=stage.folder / f"{slot}.offsets", host=where["host"], port=where["port"], user=where["user"],
            dbname=where["dbname"], slot=slot, poll_interval=poll_interval,
        )
    )  # fmt: skip
    folder = program()
    command = ["java", "-Xmx512m", "-cp", f"{folder}/classes:{folder}/jars/*", "Relay", str(properties)]

    def streams() -> bool:
        with psycopg.connect(url, autocommit=True) as connection:
            query = "select active from pg_replication_slots where slot_name = %s"
            row = connection.execute(query, [slot]).fetchone()
        return row is not None and bool(row[0])

    engine = Child(
        NAME, [*command, stage.broker.bootstrap], log=stage.folder / f"{slot}.log", ready=streams, start_timeout=180.0
    )
    engine.launch()
    return engine


def insert(topic: str, connection: psycopg.Connection, key: str) -> UUID:
    """Insert one event. The router sends it to the topic named by ``aggregatetype``."""
    event = uuid4()
    connection.execute(_INSERT, [event, topic, key, "order.placed", _PAYLOAD])
    return event
