"""Story 8: mistakes that the API server accepts get the condition of ``docs/mistakes.md``, and others keep working."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from helm_release import NAMESPACE, Installed
from namespace import StoryNamespace, restarts, violations
from support.mistakes_page import Mistake, mistakes
from support.wait import wait_until

RECONCILES = re.compile(r'^mailboat_operator_reconciles_total\{result="(\w+)"\} (\S+)$', re.MULTILINE)


NOT_READY = mistakes("Accepted, but never Ready")


@pytest.fixture(scope="module")
def shop(story: StoryNamespace) -> StoryNamespace:
    """A relay and a subscription that work."""
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    return story


@pytest.fixture(scope="module")
def crashed(shop: StoryNamespace, mailboat: Installed) -> Callable[[], list[str]]:
    """Names of operators and relays that crashed since the story began.

    A replaced operator counts. A replaced relay does not, since a new Secret rolls its Deployment. A restart after a
    lost leader lease on a stalled machine does not count either.
    """
    before = {pod["metadata"]["name"]: restarts(pod) for pod in (*mailboat.operators(), *shop.relay_pods())}
    operators = {pod["metadata"]["name"] for pod in mailboat.operators()}

    def lost_the_lead(name: str) -> bool:
        previous = ("--namespace", NAMESPACE, "logs", name, "--previous")
        return name in operators and "The lead was lost" in shop.cluster.commands.try_kubectl(*previous).out

    def since() -> list[str]:
        pods = {pod["metadata"]["name"]: restarts(pod) for pod in (*mailboat.operators(), *shop.relay_pods())}
        restarted = [name for name, count in pods.items() if count > before.get(name, 0)]
        return [*(name for name in restarted if not lost_the_lead(name)), *sorted(operators - pods.keys())]

    return since


@pytest.fixture(scope="module")
def trading(shop: StoryNamespace) -> Iterator[ExitStack]:
    """A load until the stack is closed."""
    with ExitStack() as load:
        load.enter_context(shop.trading())
        yield load


@pytest.fixture(scope="module")
def made(shop: StoryNamespace, trading: ExitStack, crashed: Callable[[], list[str]]) -> None:
    """Apply all mistakes of the second chapter at once, since some are reported only after a start or a time-out."""
    for mistake in NOT_READY:
        shop.apply(mistake.manifest)


@pytest.mark.parametrize("mistake", NOT_READY, ids=lambda mistake: mistake.title)
@pytest.mark.usefixtures("made")
def test_a_mistake_found_after_apply_is_reported_in_the_condition(
    shop: StoryNamespace, crashed: Callable[[], list[str]], mistake: Mistake
) -> None:
    expected = re.compile(".*?".join(map(re.escape, mistake.answer.split("…"))), re.DOTALL)
    wait_until(
        lambda: ready_conditions(shop, mistake),
        90,
        f"a condition {mistake.answer}",
        met=lambda conditions: any(expected.fullmatch(each) for each in conditions),
    )
    assert crashed() == []
    assert_unharmed(shop)
    # Not in a `finally`: if the test fails, the evidence should contain the resources.
    shop.kubectl("delete", "--filename", "-", "--wait=true", input=shop.filled_in(mistake.manifest))


def test_the_valid_subscription_still_delivers_after_all_mistakes(
    shop: StoryNamespace, mailboat: Installed, crashed: Callable[[], list[str]], trading: ExitStack
) -> None:
    trading.close()
    shop.until_lag("orders-to-kafka")
    shop.until_ready("orders-to-kafka")
    proof = shop.audit("orders")
    assert violations(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["duplicates"] == 0, "a mistake in another resource restarted a relay"
    assert crashed() == []
    results = [match for metrics in mailboat.metrics().values() for match in RECONCILES.findall(metrics)]
    assert {result for result, count in results if float(count)} >= {"done"}, f"no relay was reconciled: {results}"
    assert [count for result, count in results if result == "failed" and float(count)] == [], (
        "a mistake in a manifest counts as an error of the operator"
    )


def assert_unharmed(shop: StoryNamespace) -> None:
    """The valid subscription is Ready, or becomes so: a relay on a stalled machine may answer late."""
    shop.until_ready("orders-to-kafka", timeout=60)


def ready_conditions(shop: StoryNamespace, mistake: Mistake) -> list[str]:
    """Status, reason and message of the Ready conditions of the manifest's resources."""
    resources = re.findall(
        r"^kind: (OutboxRelay|EventSubscription)$\nmetadata: \{name: ([a-z-]+)", mistake.manifest, re.MULTILINE
    )
    assert resources, mistake.manifest
    conditions = [shop.condition(name, "Ready", kind.lower()) for kind, name in resources]
    return [f"{each.get('status')} {each.get('reason')}: {each.get('message')}" for each in conditions]
