"""The release of the chart on the cluster."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster
from readme import ROOT, commands

CHART = ROOT / "charts" / "mailboat"
DOCS = ROOT / "docs" / "kubernetes.md"
NAMESPACE = "mailboat-system"
RELEASE = "mailboat"
LEASE = "mailboat-operator"
_HERE = ("--namespace", NAMESPACE)
_WAIT = ("--wait", "--timeout", "180s")


@dataclass(frozen=True, slots=True)
class Installed:
    """A release of the chart with two operators, so that one can be killed, or with the chart's defaults."""

    cluster: Cluster

    def ensure(self, *, defaults: bool = False) -> None:
        """If there is no release, install it by the command of the README. With ``defaults`` set only the images."""
        if self.cluster.helm("list", *_HERE, "--short").split() != [RELEASE]:
            program, *arguments = commands()[0]
            chart = str(CHART.relative_to(ROOT))
            assert [program, *arguments[:3]] == ["helm", "install", RELEASE, chart]
            words = (str(CHART) if word == chart else word for word in arguments)
            self.cluster.helm(*words, *_WAIT, *_set(_images(self.cluster.images)), *_set({} if defaults else _SETTINGS))

    def install(self, chart: Path, images: Mapping[str, str]) -> None:
        """Install another chart with other images."""
        values = (*_set(_images(images)), *_set(_SETTINGS))
        self.cluster.helm("install", RELEASE, str(chart), *_HERE, "--create-namespace", *_WAIT, *values)

    def upgrade(self) -> None:
        """Upgrade to the current chart and images by the command of the docs. Other values come from the release."""
        documented = re.search(r"`(helm upgrade [^`]+)`", DOCS.read_text(encoding="utf-8"))
        assert documented, f"{DOCS} has no command for the upgrade"
        program, *words = shlex.split(documented[1])
        chart = str(CHART.relative_to(ROOT))
        assert (program, words.count(chart)) == ("helm", 1), documented[1]
        words[words.index(chart)] = str(CHART)
        self.cluster.helm(*words, *_WAIT, *_set(_images(self.cluster.images)))

    def test(self) -> str:
        """Run ``helm test`` and return its output. If no operator answers, it raises."""
        return self.cluster.helm("test", RELEASE, *_HERE, "--timeout", "150s")

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", RELEASE, *_HERE, "--wait", "--ignore-not-found")

    def lease(self) -> dict[str, Any]:
        """Spec of the leader's Lease."""
        answer = self.cluster.kubectl(*_HERE, "get", "lease", LEASE, "--output=json")
        spec: dict[str, Any] = json.loads(answer)["spec"]
        return {"holderIdentity": None, "renewTime": None, **spec}

    def metrics(self) -> dict[str, str]:
        """Metrics of each operator, by pod."""
        names = [pod["metadata"]["name"] for pod in self.operators()]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{{}}:8080/proxy/metrics"
        return {name: self.cluster.kubectl("get", "--raw", path.format(name)) for name in names}

    def operators(self) -> list[dict[str, Any]]:
        return self.cluster.list("pods", NAMESPACE, "app.kubernetes.io/component=operator")


def _images(images: Mapping[str, str]) -> dict[str, str]:
    operator, relay = (images[name].rpartition(":") for name in ("operator", "relay"))
    return {
        "image.repository": operator[0],
        "image.tag": operator[2],
        "relay.image.repository": relay[0],
        "relay.image.tag": relay[2],
    }


def _set(values: Mapping[str, str]) -> list[str]:
    return [argument for name, value in values.items() for argument in ("--set", f"{name}={value}")]


_SETTINGS = {
    "replicas": "2",
    "operator.statusInterval": "2s",
    "operator.shutdownDelay": "1s",  # no pods are created while operators stop
    "webhook.timeoutSeconds": "15",  # so that a pod gets its sidecar on a busy machine too
}
