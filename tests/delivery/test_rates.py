"""Event rates: the increase of the count over the last ten seconds."""

from __future__ import annotations

from mailboat.runtime.totals import Rates


def test_a_rate_is_what_was_gained_over_the_last_seconds() -> None:
    rates = Rates()
    assert rates["orders"] == 0.0
    rates.note("orders", 100.0, 50)
    assert rates["orders"] == 0.0, "one look tells nothing about speed"
    rates.note("orders", 101.0, 80)
    assert rates["orders"] == 30.0
    for second in range(2, 30):
        rates.note("orders", 100.0 + second, 80)
    assert rates["orders"] == 0.0, "the burst is long over"
    assert rates["payments"] == 0.0


def test_a_deleted_subscription_leaves_nothing_and_a_new_one_of_its_name_restarts() -> None:
    rates = Rates()
    rates.note("orders", 1.0, 0)
    rates.note("orders", 2.0, 100)
    rates.forget_all_but({"payments"})
    rates.note("orders", 3.0, 7)
    assert rates["orders"] == 0.0
