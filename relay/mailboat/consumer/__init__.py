"""The consumer kit: application code at the end of a subscription.

    view = Consumer("shop/orders-view", manifests="manifests/")

    @view.on("order.*")
    async def project(order: Order, event: Event, tx: AsyncConnection) -> None:
        await tx.execute("insert into orders_view ...")

    view.run()

Layers, from the top:

| module | holds |
|---|---|
| ``consumer`` | ``Consumer``: registration, configuration, life cycle |
| ``consumer_settings``, ``arguments`` | configuration from manifests or from arguments |
| ``pull_runner`` | life of a consumer on an outbox |
| ``broker`` | consumers behind Kafka and Pub/Sub: runner, engine, sources |
| ``claims`` | stores of handled events |
| ``status_server``, ``report_metrics`` | the status of a consumer process over HTTP, and its metrics |
| ``pull_source`` | the engine for pull subscriptions: workers, wake-up, reconnects |
| ``transactions`` | one worker's connection: psycopg and SQLAlchemy, synchronous and asynchronous |
| ``dispatch`` | which handlers run for a batch, with which arguments; independent of the source |
| ``handlers``, ``payloads`` | a registered function, and where its arguments come from |
| ``handler_outcomes``, ``received_event`` | exceptions that a handler may raise, and the event that it receives |

States of a worker of the pull engine: *idle* (waits for a notification or the next poll) → *pulled* (a transaction is
open, its partition is locked) → *handling* → *committed*; or → *rolled back* → *refused* (in a separate transaction). A
source for brokers replaces ``pull_source`` and ``transactions`` and uses the other modules unchanged.
"""

from mailboat.consumer.arguments import Inbox, Kafka, PubSub, Redis
from mailboat.consumer.consumer import Consumer
from mailboat.consumer.handler_outcomes import Ignore, Refuse, RetryLater
from mailboat.consumer.received_event import Event

__all__ = ["Consumer", "Event", "Ignore", "Inbox", "Kafka", "PubSub", "Redis", "Refuse", "RetryLater"]
