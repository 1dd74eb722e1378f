"""A real Prometheus that scrapes every second, for tests of queries."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mailboat_devservers.errors import PartMissing
from mailboat_devservers.ports import accepts_connections, free_port
from mailboat_devservers.processes import Child

Series = tuple[dict[str, str], list[tuple[float, float]]]
"""Labels, and (time, value) pairs."""


class PrometheusServer(Child):
    """Server that scrapes ``targets``: labels by address."""

    def __init__(self, directory: Path, targets: Mapping[str, Mapping[str, str]]) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise PartMissing("Prometheus: apt-get install prometheus")
        directory.mkdir(parents=True, exist_ok=True)
        groups = [{"targets": [address], "labels": dict(labels)} for address, labels in targets.items()]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "mailboat", "static_configs": groups}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._port = free_port()
        command = [
            program,
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        ready = lambda: accepts_connections(self._port)  # noqa: E731
        super().__init__("Prometheus", command, log=directory / "server.log", ready=ready, start_timeout=120.0)

    def value(self, expression: str) -> float | None:
        """Return the only value of an expression now, or None without data."""
        result = self._get("query", query=expression)
        assert len(result) <= 1, f"{expression} has {len(result)} series"
        return float(result[0]["value"][1]) if result else None

    def series(self, expression: str, begin: float, end: float) -> list[Series]:
        """Return the values of an expression, one per second."""
        result = self._get("query_range", query=expression, start=str(begin), end=str(end), step="1")
        return [
            (each["metric"], [(float(at), float(value)) for at, value in each["values"] if value != "NaN"])
            for each in result
        ]

    def _get(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}?{query}", timeout=60) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])
