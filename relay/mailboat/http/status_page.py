"""The page at ``/``: the status of this process for a person with a browser.

Read-only HTML without scripts. It reloads itself, its size is bounded, and every value is escaped: names, errors and
messages may contain anything. It shows nothing that ``/status`` does not.
"""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version
from itertools import islice

from mailboat.runtime.relay_status import ProcessStatus, RelayStatus, SubscriptionStatus

RELOAD_AFTER = 5
"""Seconds."""
_MOST_ROWS = 200
_LONGEST = 500
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 2em 0 .3em; } h2 + p { margin-top: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #8885; padding: .35em .8em .35em 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: #1a7f37; } .bad { color: #cf222e; } .warn { color: #9a6700; } .quiet { opacity: .7; }
.error { overflow-wrap: anywhere; }
"""
_COLUMNS = ("Subscription", "Ready", "Sink", "Owned", "Lag", "Oldest", "Parked", "Dead", "Rate", "Last error")
_NUMBERS = frozenset({"Owned", "Lag", "Oldest", "Parked", "Dead", "Rate"})


def render_page(status: ProcessStatus) -> str:
    parts = [_relay(relay) for relay in status.relays[:_MOST_ROWS]] or ["<p class=warn>No configuration yet.</p>"]
    if status.config.error:
        parts.insert(0, f"<p class=bad>The configuration was refused: {_text(status.config.error)}</p>")
    title = ", ".join(relay.name for relay in status.relays[:3]) or "no relay"
    return (
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=refresh content="{RELOAD_AFTER}"><meta name=viewport content="width=device-width">'
        f"<title>{_text(title)} - Mailboat</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>Mailboat</h1>\n{''.join(parts)}\n"
        f"<p class=quiet>mailboat {_text(version('mailboat'))}, this process only; reloads every {RELOAD_AFTER} s."
        " As JSON: <a href=/status>/status</a>; for Prometheus: <a href=/metrics>/metrics</a>.</p>\n</body></html>\n"
    )


def _relay(relay: RelayStatus) -> str:
    state = "good" if relay.state == "Running" else "bad"
    peers = f"; relays of this outbox: {_text(', '.join(relay.peers))}" if relay.peers else ""
    retention = f"retention is blocked: {relay.retention_blocked}" if relay.retention_blocked else ""
    remarks = [relay.message, retention, relay.old_snapshot]
    shown = relay.subscriptions[:_MOST_ROWS]
    partitions = islice(_partitions(shown, relay.relay), _MOST_ROWS)
    omitted = len(relay.subscriptions) - len(shown)
    more = f"<p class=quiet>and {omitted} more subscriptions: see /status</p>" if omitted else ""
    return (
        f"<h2>{_text(relay.name)} <span class={state}>{_text(relay.state)}</span></h2>"
        f"<p class=quiet>relay {_text(relay.relay)}, outbox {_text(relay.outbox)}{peers}</p>"
        + "".join(f"<p class=bad>{_text(remark)}</p>" for remark in remarks if remark)
        + "".join(f"<p class=warn>{_text(remark)}</p>" for remark in relay.coverage.remarks())
        + _table(_COLUMNS, (_subscription(each) for each in shown))
        + more
        + _table(("Partition", "Owner", "Lag", "Parked", "Published here"), partitions)
    )


def _subscription(each: SubscriptionStatus) -> list[str]:
    owned = sum(owner is not None for owner in each.owners.values()) or len(each.owned)
    ready = each.state == "Running" and each.sink_reachable is not False and owned >= each.partitions
    word, style = (str(ready), "good" if ready else "bad") if each.state == "Running" else (each.state, "warn")
    age = f" ({_age(each.last_error_age)} ago)" if each.last_error_age else ""
    return [
        _text(each.name),
        f"<span class={style}>{_text(word)}</span>",
        _text(each.sink),
        f"{owned}/{each.partitions}",
        f"{each.lag}{'+' if each.lag_bounded else ''}",
        _age(each.oldest_age),
        f"<span class={'warn' if each.parked else 'quiet'}>{each.parked}</span>",
        f"<span class={'bad' if each.dead else 'quiet'}>{each.dead}</span>",
        f"{each.rate:.1f}/s",
        f"<span class=error>{_text(each.last_error)}{age}</span>" if each.last_error else "",
    ]


def _partitions(subscriptions: Iterable[SubscriptionStatus], me: str) -> Iterable[list[str]]:
    for each in subscriptions:
        owned_partitions = {owned.partition: owned for owned in each.owned}
        for partition in range(each.partitions):
            owned = owned_partitions.get(partition)
            owner = me if owned is not None else each.owners.get(partition)
            details = (str(owned.lag), str(owned.parked), str(owned.published)) if owned is not None else ("", "", "")
            yield [
                f"{_text(each.name)} {partition}",
                _text(owner) if owner else "<span class=bad>none</span>",
                *details,
            ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are HTML already."""
    styles = [" class=n" if column in _NUMBERS else "" for column in columns]
    head = "".join(f"<th{style}>{column}</th>" for style, column in zip(styles, columns, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{style}>{cell}</td>' for style, cell in zip(styles, row, strict=True))}</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def _text(value: object) -> str:
    """Return any value as harmless HTML of bounded length."""
    text = str(value)
    return escape(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    return f"{whole}s" if whole < 120 else f"{whole // 60}m" if whole < 7200 else f"{whole // 3600}h"
