"""``kubectl apply`` prints the messages that ``docs/mistakes.md`` shows."""

from __future__ import annotations

import pytest

from mailboat_devservers.kubernetes import ApiServer
from support.mistakes_page import Mistake, mistakes

REFUSED = mistakes("Refused by `kubectl apply`")


def test_the_page_shows_refused_manifests() -> None:
    assert len(REFUSED) >= 10


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.title)
def test_a_mistake_is_refused_with_the_message_of_the_page(api: ApiServer, namespace: str, mistake: Mistake) -> None:
    applied = api.try_kubectl("--namespace", namespace, "apply", "--filename", "-", input=mistake.manifest)
    assert applied.status != 0
    assert mistake.answer in applied.err
