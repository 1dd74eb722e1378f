"""Story 8: the mistakes of ``docs/mistakes.md``, made for real: answered as the page says, and harmless to the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from helm_release import NAMESPACE, Installed
from namespace import Stage, restarts, wrong_in
from support.wait import wait_until

RECONCILES = re.compile(r'^mailboat_operator_reconciles_total\{result="(\w+)"\} (\S+)$', re.MULTILINE)
PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"


class Mistake(NamedTuple):
    """One section of the page."""

    title: str
    manifest: str
    answer: str


def mistakes(chapter: str) -> list[Mistake]:
    found = re.search(rf"^## {chapter}$(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE} has no chapter {chapter}"
    sections = re.findall(r"^### (.+?)$.*?```yaml\n(.*?)```.*?```text\n(.*?)\n```", found[1], re.MULTILINE | re.DOTALL)
    return [Mistake(*section) for section in sections]


REFUSED = mistakes("Refused by `kubectl apply`")
NOT_READY = mistakes("Taken, but never ready")


def test_the_page_has_at_least_twenty() -> None:
    assert len(REFUSED) + len(NOT_READY) >= 20


@pytest.fixture(scope="module")
def shop(stage: Stage) -> Stage:
    """Something that works, before the mistakes begin."""
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    return stage


@pytest.fixture(scope="module")
def crashed(shop: Stage, mailboat: Installed) -> Callable[[], list[str]]:
    """Operators, and relays of whatever is there just now, that were restarted since the story began.

    An operator that was replaced counts too. A relay may be, in good order: a Secret that no pod has mounted yet rolls
    its Deployment. And an operator that lost the lead to a stalled machine ends as it should.
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
def trading(shop: Stage) -> Iterator[ExitStack]:
    """Events flow all the while; whoever closes it ends that."""
    with ExitStack() as load:
        load.enter_context(shop.trading())
        yield load


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.title)
@pytest.mark.usefixtures("trading")
def test_a_mistake_is_refused_in_the_words_of_the_page(shop: Stage, mistake: Mistake) -> None:
    with pytest.raises(shop.cluster.Failed) as refusal:
        shop.kubectl("apply", "--filename", "-", input=mistake.manifest)
    assert mistake.answer in str(refusal.value)
    assert_unharmed(shop)


@pytest.fixture(scope="module")
def made(shop: Stage, trading: ExitStack, crashed: Callable[[], list[str]]) -> None:
    """All the mistakes of the second chapter, at once: to notice some of them takes a relay's start, or a timeout."""
    for mistake in NOT_READY:
        shop.apply(mistake.manifest)


@pytest.mark.parametrize("mistake", NOT_READY, ids=lambda mistake: mistake.title)
@pytest.mark.usefixtures("made")
def test_a_mistake_that_only_shows_later_is_told_in_the_condition(
    shop: Stage, crashed: Callable[[], list[str]], mistake: Mistake
) -> None:
    expected = re.compile(".*?".join(map(re.escape, mistake.answer.split("…"))), re.DOTALL)
    wait_until(
        lambda: told(shop, mistake),
        90,
        f"one of the resources to say: {mistake.answer}",
        met=lambda words: any(expected.fullmatch(each) for each in words),
    )
    assert crashed() == [], "nothing crashes for it"
    assert_unharmed(shop)
    # Not in a `finally`: where it failed, the evidence should show it.
    shop.kubectl("delete", "--filename", "-", "--wait=true", input=shop.filled_in(mistake.manifest))


def test_what_worked_before_works_after_all_of_them(
    shop: Stage, mailboat: Installed, crashed: Callable[[], list[str]], trading: ExitStack
) -> None:
    trading.close()
    shop.until_lag("orders-to-kafka")
    shop.until_ready("orders-to-kafka")
    proof = shop.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["duplicates"] == 0, "nobody else's mistake made a relay start anew"
    assert crashed() == []
    results = [match for said in mailboat.metrics().values() for match in RECONCILES.findall(said)]
    assert {result for result, count in results if float(count)} >= {"done"}, f"somebody looked at relays: {results}"
    assert [count for result, count in results if result == "failed" and float(count)] == [], (
        "a mistake in a manifest is no error of the operator's"
    )


def assert_unharmed(shop: Stage) -> None:
    """What works goes on working. A relay that a stalled machine keeps from answering has a moment to do so."""
    shop.until_ready("orders-to-kafka", timeout=60)


def told(shop: Stage, mistake: Mistake) -> list[str]:
    """What the resources of the manifest say: status, reason and message of Ready."""
    resources = re.findall(
        r"^kind: (OutboxRelay|EventSubscription)$\nmetadata: \{name: ([a-z-]+)", mistake.manifest, re.MULTILINE
    )
    assert resources, mistake.manifest
    conditions = [shop.condition(name, "Ready", kind.lower()) for kind, name in resources]
    return [f"{each.get('status')} {each.get('reason')}: {each.get('message')}" for each in conditions]
