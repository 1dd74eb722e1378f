"""The panels of a Grafana dashboard as one HTML page, drawn from the results of a Prometheus.

The page contains the titles, positions, legends and lines of the dashboard file. Nothing else of Grafana is imitated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from support.prometheus_server import Series

WIDTH = 1200
_ROW = 30
_COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9")
_STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 12px sans-serif; position: relative }
section { position: absolute; box-sizing: border-box; background: #181b1f; border: 1px solid #2c2f36; padding: 6px 8px;
  overflow: hidden }
h2 { font-size: 13px; margin: 0 0 4px; font-weight: 500 } section.row { background: none; border: 0 }
p.stat { font-size: 40px; text-align: center; margin: 8px; color: #73bf69 } ul { margin: 2px 0; padding: 0 }
li { display: inline-block; margin-right: 12px }
"""

Answers = Callable[[str], list[Series]]


def height(dashboard: dict[str, Any]) -> int:
    """Return the height of the page in pixels."""
    return _ROW * max(int(panel["gridPos"]["y"]) + int(panel["gridPos"]["h"]) for panel in dashboard["panels"])


def page(dashboard: dict[str, Any], answers: Answers) -> str:
    """Return the page; ``answers`` returns the series of an expression."""
    panels = "".join(_panel(panel, answers) for panel in dashboard["panels"])
    return f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style><body>{panels}"


def _panel(panel: dict[str, Any], answers: Answers) -> str:
    place = panel["gridPos"]
    box = [place["x"] * WIDTH // 24, place["y"] * _ROW, place["w"] * WIDTH // 24 - 6, place["h"] * _ROW - 6]
    style = "left:{}px;top:{}px;width:{}px;height:{}px".format(*box)
    named = [
        (_legend(target["legendFormat"], labels), points)
        for target in panel.get("targets", ())
        for labels, points in answers(target["expr"])
    ]
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
    if panel["type"] == "stat":
        content = f"<p class=stat>{escape(_number(named[0][1][-1][1], unit))}</p>" if named else ""
    else:
        content = _lines(named, unit, box[2] - 18, box[3] - 60) if named else ""
    return f'<section class={panel["type"]} style="{style}"><h2>{escape(panel["title"])}</h2>{content}</section>'


def _legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), pattern).strip()


def _lines(named: Sequence[tuple[str, list[tuple[float, float]]]], unit: str, width: int, height: int) -> str:
    times = [at for _, points in named for at, _ in points]
    begin, span = min(times), max(max(times) - min(times), 1.0)
    top = max(value for _, points in named for _, value in points) * 1.1 or 1.0
    drawn, legend = [], []
    for number, (name, points) in enumerate(named):
        color = _COLORS[number % len(_COLORS)]
        line = " ".join(
            f"{(at - begin) / span * width:.1f},{height - value / top * height:.1f}" for at, value in points
        )
        drawn.append(f'<polyline points="{line}" fill=none stroke="{color}" stroke-width=1.5 />')
        legend.append(f'<li style="color:{color}">{escape(name)}</li>')
    text = f'<text x=2 y=10 fill="#8e8e99" font-size=10>{escape(_number(top, unit))}</text>'
    axis = f'<path d="M0 {height}H{width}" stroke="#2c2f36" />'
    return f"<svg width={width} height={height}>{axis}{''.join(drawn)}{text}</svg><ul>{''.join(legend)}</ul>"


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:.0f} MiB"
    shown = {"s": " s", "eps": "/s", "ops": "/s", "reqps": "/s", "d": " days"}.get(unit, "")
    return f"{value:.3g}{shown}" if value < 1000 else f"{value:.0f}{shown}"
