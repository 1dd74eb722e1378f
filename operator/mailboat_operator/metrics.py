"""Prometheus metrics of the operator. Labels are kinds, verbs and resources: a bounded number of each."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mailboat_spec.names import RELAY_PLURAL, SUBSCRIPTION_PLURAL


class Metrics:
    """All metrics of one process. They exist before the process leads, so a standby replica reports 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.leader = gauge("mailboat_operator_leader", "1 while this process leads.")
        self.reconciles = counter("mailboat_operator_reconciles", "Reconciles, by result.", ["result"])
        self.reconcile_seconds = histogram("mailboat_operator_reconcile_seconds", "Duration of a reconcile.")
        self.queue = gauge("mailboat_operator_queue", "Relays that are due to be reconciled and wait.")
        self.api_requests = counter(
            "mailboat_operator_api_requests", "Requests to the Kubernetes API.", ["verb", "resource", "code"]
        )
        self.status_patches = counter("mailboat_operator_status_patches", "Statuses written.", ["resource"])
        self.drift_corrected = counter(
            "mailboat_operator_drift_corrected", "Children restored after a change by another client.", ["kind"]
        )
        self.pushes = counter(
            "mailboat_operator_pushes", "Configurations and assignments pushed to relays.", ["what", "code"]
        )
        self.relays = gauge(
            "mailboat_operator_relay_pods", "Relay pods, by whether they answer.", ["namespace", "relay", "answers"]
        )
        self.without_sidecar = gauge(
            "mailboat_operator_pods_without_sidecar",
            "Pods that request a sidecar and have none.",
            ["namespace", "relay"],
        )
        self.ready = gauge(
            "mailboat_operator_ready",
            "1 while the condition Ready of a resource is True.",
            ["resource", "namespace", "name"],
        )
        self.lag = gauge(
            "mailboat_operator_subscription_lag",
            "Events that wait, as written into the status.",
            ["namespace", "subscription"],
        )
        self.injections = counter("mailboat_operator_injections", "Pods that the webhook was asked about.", ["outcome"])
        self.injection_seconds = histogram("mailboat_operator_injection_seconds", "Time to an answer of the webhook.")
        self.certificate_ends = gauge(
            "mailboat_operator_certificate_expiry_timestamp_seconds",
            "When the certificate that this replica serves ends; 0 while it has none.",
        )

    def forget_relay(self, namespace: str, name: str) -> None:
        """Remove the series of a deleted relay, which would stay exposed otherwise."""
        for gauge in (self.relays, self.without_sidecar):
            gauge.remove_by_labels({"namespace": namespace, "relay": name})
        self.ready.remove_by_labels({"resource": RELAY_PLURAL, "namespace": namespace, "name": name})

    def forget_subscription(self, namespace: str, name: str) -> None:
        self.lag.remove_by_labels({"namespace": namespace, "subscription": name})
        self.ready.remove_by_labels({"resource": SUBSCRIPTION_PLURAL, "namespace": namespace, "name": name})

    def on_request(self, verb: str, plural: str, code: str) -> None:
        self.api_requests.labels(verb, plural, code).inc()
