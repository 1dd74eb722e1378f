"""Story 6: the database's password is changed while events flow."""

from __future__ import annotations

import base64
import json

from namespace import DATABASE, PASSWORD, Stage, restarts, wrong_in
from support.wait import wait_until

NEW = "second-password"
WRITERS = 4
"""Of the trader, unless it is told otherwise."""


def test_a_new_password_reaches_the_relays_in_place_and_nothing_is_lost(stage: Stage) -> None:
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    stage.until_ready("orders", kind="outboxrelay")  # both of its relays, for both are asked
    pods = {pod["metadata"]["name"]: restarts(pod) for pod in stage.relay_pods()}
    before = wait_until(
        lambda: secret_versions(stage), 180, "both to say which Secret they use", met=lambda now: all(now.values())
    )

    with stage.trading():
        connected = "select count(*) from pg_stat_activity where application_name = 'shop'"
        wait_until(lambda: int(stage.in_postgres(connected)), 120, "all of the shop's writers", met=WRITERS.__le__)
        # The relays are locked out; the application's connections are open already, and it trades on.
        stage.in_postgres(f"alter role shop password '{NEW}'")
        stage.in_postgres(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'mailboat %'"
        )
        wait_until(
            lambda: stage.condition("orders-to-kafka", "Ready"),
            180,
            "the status to say that the database does not let the relays in",
            met=lambda ready: ready.get("reason") == "DatabaseUnreachable",
        )
        stage.until_written(100)

        set_url(stage, "orders-db")
        # Kubernetes brings a changed Secret into running pods within about a minute.
        wait_until(
            lambda: secret_versions(stage),
            180,
            "the relays to have the new one",
            met=lambda now: all(now.values()) and not set(now.values()) & set(before.values()),
        )
        stage.until_ready("orders-to-kafka")

    set_url(stage, "shop-db")  # the application takes it from its environment
    stage.kubectl("rollout", "restart", "deployment/shop")
    stage.kubectl("rollout", "status", "deployment/shop", "--timeout=180s")
    stage.trade(200)
    stage.until_lag("orders-to-kafka")
    proof = stage.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert {pod["metadata"]["name"]: restarts(pod) for pod in stage.relay_pods()} == pods, "no pod was restarted"
    for name in pods:
        logs = stage.kubectl("logs", name)
        assert NEW not in logs
        assert PASSWORD not in logs


def set_url(stage: Stage, secret: str) -> None:
    url = base64.b64encode(DATABASE.replace(PASSWORD, NEW).encode()).decode()
    stage.kubectl("patch", "secret", secret, "--patch", json.dumps({"data": {"url": url}}))


def secret_versions(stage: Stage) -> dict[str, str]:
    """Which version of the Secret each relay uses, by its own word; of one that does not answer just now, none."""
    found = {}
    for name in [pod["metadata"]["name"] for pod in stage.relay_pods()]:
        try:
            found[name] = stage.relay_status(name)["secrets"].get("orders-db", "")
        except stage.cluster.Failed:
            found[name] = ""
    return found
