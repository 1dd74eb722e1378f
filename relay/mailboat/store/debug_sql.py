"""The statements that read and settle windows, as a script for psql. No database is needed to compose them.

Parameters become psql variables with example values, so that a statement can be run or explained on its own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from psycopg import sql

from mailboat.store.outbox_store import CursorKey, Lease, Subscription
from mailboat.store.queries import QueryCache, Since, SubscriptionQuery, TailKind, effective_filter, predicate
from mailboat.store.settings import ReadLimits
from mailboat.store.sql import comments, statements
from mailboat.store.table import TableLayout
from mailboat_spec import EventSubscription, full_name

_SQL = statements("windows")
_FRAGMENTS = ("head", "this_window", "late_arm", "occupied", "stray")
_PARAMETER = re.compile(r"%\((\w+)\)s|%%")
_EPOCH = "00000000-0000-0000-0000-000000000000"
_SNAPSHOT = "1000:1000:"

_EXAMPLES = {
    "epoch": _EPOCH,
    "settled_snapshot": _SNAPSHOT,
    "window_snapshot": _SNAPSHOT,
    "lowest": "1",
    "highest": "1000",
    "after": "0",
    "reach": "1000",
    "bytes": "0",
    "limit": str(ReadLimits().small_rows + 1),
    "max_bytes": str(ReadLimits().bytes),
    "pooled": "false",
    "timeline": "1",
    "level": "local",
    "outbox": "0",
    "read": "{}",
    "checks": "true",
    "epochs": f"{{{_EPOCH}}}",
    "window_snapshots": f"{{{_SNAPSHOT}}}",
    "positions": "{1000}",
    "sequences": "{1}",
    "settled_snapshots": f"{{{_SNAPSHOT}}}",
    "next_snapshots": "{NULL}",
    "lowest_ids": "{NULL}",
    "highest_ids": "{NULL}",
    "in_flight": "{false}",
}


def psql_script(layout: TableLayout, resources: Sequence[EventSubscription]) -> str:
    """Return the statements of a relay that delivers all of these subscriptions. Empty if there are none."""
    delivered = [each for each in resources if each.spec.sink.pull is None]
    if not delivered:
        return ""
    queries = {number: _query(number, resource) for number, resource in enumerate(delivered, start=1)}
    own = "1" * sum(query.subscription.partitions for query in queries.values())
    examples = {**_EXAMPLES, "own": own, "created_at": layout.columns.get("created_at", "created_at")}
    numbers = [f"--   {number}  {query.subscription.name}" for number, query in queries.items()]
    variables = [f"\\set {name} '{value}'" for name, value in examples.items()]
    about = (
        "-- Variables are examples, as are the numbers of subscriptions (mailboat.subscriptions.id has the real ones):"
    )
    remarks = comments("windows")
    printed = [
        f"-- name: {', '.join((name, *kind))}\n{remarks.pop(name, '')}{_with_variables(statement)};"
        for name, kind, statement in _composed(layout, queries)
    ]
    return "\n\n".join(["\n".join([about, *numbers]), "\n".join(variables), *printed])


def _query(number: int, resource: EventSubscription) -> SubscriptionQuery:
    name, spec = full_name(resource), resource.spec
    since = Since(spec.start.time.isoformat() if spec.start.time else None, spec.start.position)
    subscription = Subscription(number, name, spec.partitions, generation=1, paused=False)
    return SubscriptionQuery(subscription, predicate(effective_filter(name, spec), since))


def _composed(
    layout: TableLayout, queries: Mapping[int, SubscriptionQuery]
) -> Iterator[tuple[str, tuple[str, ...], bytes]]:
    """Yield the name, the kind and the text of each statement, in the order of ``windows.sql``."""
    cache = QueryCache(layout)
    cache.route(queries)
    composed = cache.for_members([Lease(CursorKey(number, 0), _EPOCH) for number in queries])
    tail_kinds = [TailKind(*kind) for kind in product((False, True), (None, "infinity"))]
    tails = {kind: composed.tail(kind) for kind in tail_kinds}
    by_name = {**vars(composed), "span": cache.span, "tail": tails}  # attributes have the names of statements
    for name, text in _SQL.items():
        statement = by_name.get(name)
        if isinstance(statement, dict):
            for kind, variant in statement.items():
                yield name, tuple(flag for flag, on in kind._asdict().items() if on), variant
        elif statement is not None:
            yield name, (), statement
        elif name not in _FRAGMENTS:
            yield name, (), sql.SQL(text).format(outbox=layout.regclass).as_bytes()


def _with_variables(statement: bytes) -> str:
    return _PARAMETER.sub(lambda found: f":'{found[1]}'" if found[1] else "%", statement.decode())
