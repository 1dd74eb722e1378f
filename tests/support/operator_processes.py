"""Operator processes, and the webhook configuration for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from support.cli import answer
from support.manifests import Manifest, event_subscription, kafka_sink, outbox_relay
from support.wait import wait_until

IMAGE = "mailboat-relay:test"


class RunningOperator:
    """``mailboat-operator run`` that watches its own namespace."""

    def __init__(self, folder: Path, name: str, kubeconfig: Path, namespace: str, *flags: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mailboat_operator", "run", *self._flags(kubeconfig, namespace, flags)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def _flags(self, kubeconfig: Path, namespace: str, flags: Sequence[str]) -> list[str]:
        given = {
            "--kubeconfig": str(kubeconfig),
            "--operator-namespace": namespace,
            "--namespace": namespace,
            "--identity": self.name,
            "--relay-image": IMAGE,
            "--webhook-listen": "127.0.0.1:0",
            "--webhook-host": "127.0.0.1",
            "--webhook-config-name": namespace,
            "--health-listen": "127.0.0.1:0",
            "--shutdown-delay": "0s",
            "--lease-duration": "60s",  # so that a stalled machine does not lose the leader lease
            "--log-format": "json",
        } | dict(flag.split("=", 1) for flag in flags)
        return [f"{flag}={value}" for flag, value in given.items()]

    @property
    def text(self) -> str:
        """The whole log."""
        return self._log.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines of the log."""
        whole = self.text.rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def said(self, message: str) -> dict[str, Any] | None:
        assert self.process.poll() is None, f"the operator ended:\n{self.text}"
        return next((line for line in self.lines() if line["message"] == message), None)

    def address(self, of: str) -> str:
        # The imports take seconds of CPU time, and ten times as long on a busy machine.
        line = wait_until(lambda: self.said("Listening."), timeout=60, what=f"{self.name} to listen ({self._log})")
        assert line is not None
        return str(line[of])

    def wait_leading(self, timeout: float = 60) -> None:
        wait_until(
            lambda: self.said("Acquired leader lease"), timeout=timeout, what=f"{self.name} to lead ({self._log})"
        )

    def get(self, path: str) -> tuple[int, str]:
        return answer(f"http://{self.address('health')}{path}")

    def wait_ready(self) -> None:
        wait_until(lambda: self.get("/readyz")[0] == 200, timeout=60, what=f"{self.name} to be ready ({self._log})")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


def webhook_configuration(namespace: str, address: str, failure_policy: str = "Ignore") -> dict[str, Any]:
    """Return the configuration of the chart for one namespace, by address and without a caBundle."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": namespace},
        "webhooks": [
            {
                "name": "sidecar.mailboat.dev",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": failure_policy,
                "reinvocationPolicy": "IfNeeded",
                "timeoutSeconds": 30,
                "clientConfig": {"url": f"https://{address}/inject"},
                "rules": [
                    {
                        "operations": ["CREATE"],
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "resources": ["pods"],
                        "scope": "Namespaced",
                    }
                ],
                "objectSelector": {"matchExpressions": [{"key": "mailboat.dev/relay", "operator": "Exists"}]},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            }
        ],
    }


def a_pod(name: str, relay: str = "orders", **spec: Any) -> dict[str, Any]:
    """Return a pod with the label of a relay, valid in a restricted namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"mailboat.dev/relay": relay}},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "shop",
                    "image": "shop:1",
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
            **spec,
        },
    }


a_relay = partial(outbox_relay, namespace=None, runtime="Sidecar")


def a_subscription(name: str = "to-kafka", relay: str = "orders") -> Manifest:
    """Return a subscription with its own Secret and a dead-letter topic."""
    sink = kafka_sink(configSecretRef={"name": "kafka-login"})
    return event_subscription(
        name, sink, relay=relay, namespace=None, delivery={"deadLetter": {"topic": "orders.dead"}}
    )
