"""Story 6: the database's password is changed while events flow."""

from __future__ import annotations

import base64
import json

from namespace import DATABASE, PASSWORD, StoryNamespace, restarts, violations
from support.wait import wait_until

NEW = "second-password"
WRITERS = 4
"""Default number of the trader's writers."""


def test_relays_reload_a_changed_password_without_a_restart_and_lose_nothing(story: StoryNamespace) -> None:
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    story.until_ready("orders", kind="outboxrelay")  # both relays answer
    pods = {pod["metadata"]["name"]: restarts(pod) for pod in story.relay_pods()}
    before = wait_until(
        lambda: secret_versions(story), 180, "both relays to report a Secret", met=lambda now: all(now.values())
    )

    with story.trading():
        connected = "select count(*) from pg_stat_activity where application_name = 'shop'"
        wait_until(lambda: int(story.in_postgres(connected)), 120, "all writers of the shop", met=WRITERS.__le__)
        # Postgres rejects the relays, while the open connections of the application stay.
        story.in_postgres(f"alter role shop password '{NEW}'")
        story.in_postgres(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'mailboat %'"
        )
        wait_until(
            lambda: story.condition("orders-to-kafka", "Ready"),
            180,
            "the condition DatabaseUnreachable",
            met=lambda ready: ready.get("reason") == "DatabaseUnreachable",
        )
        story.until_written(100)

        set_url(story, "orders-db")
        # kubelet updates a mounted Secret within about a minute.
        wait_until(
            lambda: secret_versions(story),
            180,
            "the relays to report the new Secret",
            met=lambda now: all(now.values()) and not set(now.values()) & set(before.values()),
        )
        story.until_ready("orders-to-kafka")

    set_url(story, "shop-db")  # the application reads it from its environment
    story.kubectl("rollout", "restart", "deployment/shop")
    story.kubectl("rollout", "status", "deployment/shop", "--timeout=180s")
    story.trade(200)
    story.until_lag("orders-to-kafka")
    proof = story.audit("orders")
    assert violations(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert {pod["metadata"]["name"]: restarts(pod) for pod in story.relay_pods()} == pods, "no pod was restarted"
    for name in pods:
        logs = story.kubectl("logs", name)
        assert NEW not in logs
        assert PASSWORD not in logs


def set_url(story: StoryNamespace, secret: str) -> None:
    url = base64.b64encode(DATABASE.replace(PASSWORD, NEW).encode()).decode()
    story.kubectl("patch", "secret", secret, "--patch", json.dumps({"data": {"url": url}}))


def secret_versions(story: StoryNamespace) -> dict[str, str]:
    """Version of the Secret that each relay reports; empty if a relay does not answer."""
    found = {}
    for name in [pod["metadata"]["name"] for pod in story.relay_pods()]:
        try:
            found[name] = story.relay_status(name)["secrets"].get("orders-db", "")
        except story.cluster.Failed:
            found[name] = ""
    return found
