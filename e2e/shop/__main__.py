"""``python -m shop``: commands that the stories run inside the cluster. Results are single lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys

import click
import psycopg

from mailboat_demo.orders import book, change, lay_out
from mailboat_demo.verification import verify_delivery
from shop.receiver import arrived_at_kafka, from_kafka, from_pubsub, stamped
from shop.sequence_numbers import numbering
from shop.topics import create_kafka_topic, create_pubsub_topic, resize_kafka_topic
from shop.trader import Trade

_ORDERS = 100


def _url() -> str:
    return os.environ["DATABASE_URL"]


@click.group()
def shop() -> None:
    """A shop and its audit."""


@shop.command()
@click.option("--kafka", metavar="HOST:PORT")
@click.option("--topic", "topics", multiple=True, help="A Kafka topic as name:partitions[:largest message].")
@click.option("--pubsub-topic", "pubsub_topics", multiple=True, help="project/topic")
def prepare(kafka: str | None, topics: tuple[str, ...], pubsub_topics: tuple[str, ...]) -> None:
    """Create missing tables and topics."""
    lay_out(_url(), [f"order-{number}" for number in range(_ORDERS)])
    for topic in topics:
        assert kafka is not None, "--topic needs --kafka"
        name, partitions, *largest = topic.split(":")
        create_kafka_topic(kafka, name, int(partitions), int(largest[0]) if largest else None)
    for topic in pubsub_topics:
        project, _, name = topic.partition("/")
        create_pubsub_topic(project, name)


@shop.command()
@click.option("--count", type=int, help="Changes to commit. [default: until SIGTERM]")
@click.option("--per-second", type=float, default=0.0, help="0: no limit.")
@click.option("--writers", type=int, default=4)
def trade(count: int | None, per_second: float, writers: int) -> None:
    """Change orders, with their events. Fails if a change failed while the database was up.

    The last line is the report; SIGUSR1 prints it at once.
    """
    trading = Trade(_url(), orders=_ORDERS, writers=writers, per_second=per_second, count=count)

    def print_report() -> None:
        # A whole line without a buffer: a signal may arrive during the write of another line.
        os.write(sys.stdout.fileno(), f"{json.dumps(dataclasses.asdict(trading.report))}\n".encode())

    signal.signal(signal.SIGTERM, lambda *_: trading.stop())
    signal.signal(signal.SIGUSR1, lambda *_: print_report())
    trading.start()
    trading.join()
    print_report()
    sys.exit(1 if trading.report.errors else 0)


@shop.command("change")
@click.argument("order")
@click.option("--type", "type_", default="order.changed")
@click.option("--filler", type=int, default=0, help="Bytes to add to the payload.")
@click.option("--count", type=int, default=1)
@click.option("--header-of-number", is_flag=True, help="Add a header that is a number, which only plain SQL can write.")
def change_one(order: str, type_: str, filler: int, count: int, header_of_number: bool) -> None:
    """Change one order a number of times."""
    for _ in range(count):
        with psycopg.connect(_url()) as connection:
            change(connection, order, type=type_, filler=filler)
            if header_of_number:
                newest = "select max(id) from mailboat.outbox where aggregate_id = %s"
                headers = """update mailboat.outbox set headers = '{"tenant": 7}'"""
                connection.execute(f"{headers} where id = ({newest})", (order,))


@shop.command()
@click.option("--kafka", metavar="HOST:PORT", required=True)
@click.option("--topic", required=True)
@click.option("--largest", type=int, required=True, help="New size limit of a message, in bytes.")
def resize(kafka: str, topic: str, largest: int) -> None:
    """Change the size limit of a topic."""
    resize_kafka_topic(kafka, topic, largest)


@shop.command()
@click.option("--kafka", metavar="HOST:PORT", required=True)
@click.option("--topic", required=True)
def arrived(kafka: str, topic: str) -> None:
    """Print the number of messages in a topic."""
    click.echo(arrived_at_kafka(kafka, topic))


@shop.command()
@click.option("--kafka", metavar="HOST:PORT", required=True)
@click.option("--topic", required=True)
def headers(kafka: str, topic: str) -> None:
    """Print headers and payload sizes of all messages of a topic."""
    click.echo(json.dumps([{**each.headers, "payload-bytes": len(each.body)} for each in from_kafka(kafka, topic)]))


@shop.command()
@click.option("--kafka", metavar="HOST:PORT")
@click.option("--topic", required=True, help="A Kafka topic, or project/topic of Pub/Sub.")
def audit(kafka: str | None, topic: str) -> None:
    """Compare committed and received events."""
    received = from_pubsub(*topic.split("/", 1)) if kafka is None else from_kafka(kafka, topic)
    messages = [stamped(message) for message in received]
    proof = verify_delivery(book(_url()), [message.arrival for message in messages])
    click.echo(json.dumps({**dataclasses.asdict(proof), **dataclasses.asdict(numbering(messages))}))


if __name__ == "__main__":
    shop()
