"""What Prometheus gets to see of the operator. Labels are kinds, verbs and resources: a bounded number of each."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """What the core counts, in the process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leader = Gauge("mailboat_operator_leader", "1 while this process leads.", registry=registry)
        self.reconciles = Counter(
            "mailboat_operator_reconciles", "Looks at a relay, by how they ended.", ["result"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            "mailboat_operator_reconcile_seconds", "How long a look at a relay takes.", registry=registry
        )
        self.queue = Gauge(
            "mailboat_operator_queue", "Relays that are due to be looked at and wait.", registry=registry
        )
        self.api_requests = Counter(
            "mailboat_operator_api_requests",
            "Requests to the Kubernetes API.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.status_patches = Counter(
            "mailboat_operator_status_patches", "Statuses that were written.", ["resource"], registry=registry
        )
        self.put_back = Counter(
            "mailboat_operator_put_back", "Children that were put back after a change by others.", ["kind"],
            registry=registry,
        )  # fmt: skip
        self.pushes = Counter(
            "mailboat_operator_pushes", "Configuration and assignments handed to relays.", ["what", "code"],
            registry=registry,
        )  # fmt: skip
        self.relays = Gauge(
            "mailboat_operator_relay_pods",
            "Relay pods by whether they answer.",
            ["namespace", "relay", "answers"],
            registry=registry,
        )
        self.lag = Gauge(
            "mailboat_operator_subscription_lag",
            "Events that wait, as written into the status.",
            ["namespace", "subscription"],
            registry=registry,
        )

    def forget_subscription(self, namespace: str, name: str) -> None:
        """It was deleted; a lag that nobody has would be seen for ever."""
        try:
            self.lag.remove(namespace, name)
        except KeyError:
            pass

    def on_request(self, verb: str, plural: str, code: str) -> None:
        """For ``Kube``."""
        self.api_requests.labels(verb, plural, code).inc()
