"""Balancing of partitions over workers: balanced, sticky, and the same for every caller."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mailboat_spec.assignment import balance

WORKERS = st.lists(st.sampled_from([f"relay-{n}" for n in range(8)]), unique=True, max_size=6)
PARTITIONS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), unique=True, max_size=40)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[str], dict[tuple[int, int], str]]:
    """Partitions, workers, and owners, some of which are not workers any more."""
    partitions, workers = draw(PARTITIONS), draw(WORKERS)
    somebody = st.one_of(st.none(), st.sampled_from([*workers, "gone-1", "gone-2"]))
    owners = {partition: draw(somebody) for partition in partitions}
    return partitions, workers, {partition: owner for partition, owner in owners.items() if owner is not None}


Situation = tuple[list[tuple[int, int]], list[str], dict[tuple[int, int], str]]


@given(situations())
def test_every_partition_has_exactly_one_live_owner(situation: Situation) -> None:
    partitions, workers, owners = situation
    answer = balance(partitions, workers, owners)
    assert answer.keys() == (set(partitions) if workers else set())
    assert set(answer.values()) <= set(workers)


@given(situations())
def test_the_shares_of_two_relays_differ_by_at_most_one(situation: Situation) -> None:
    partitions, workers, owners = situation
    answer = balance(partitions, workers, owners)
    loads = [Counter(answer.values())[worker] for worker in workers]
    assert not loads or max(loads) - min(loads) <= 1


@given(situations())
def test_no_more_moves_than_must_be(situation: Situation) -> None:
    partitions, workers, owners = situation
    if not workers:
        return
    answer = balance(partitions, workers, owners)
    moved = sum(answer[partition] != owner for partition, owner in owners.items() if owner in workers)
    # Partitions above the even share must move. If the division leaves a remainder, as many workers keep one more.
    base, extra = divmod(len(partitions), len(workers))
    held = Counter(owner for owner in owners.values() if owner in workers)
    above = [held[worker] - base for worker in workers if held[worker] > base]
    assert moved == sum(above) - min(extra, len(above))


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_does_not_matter(situation: Situation, random: Random) -> None:
    partitions, workers, owners = situation
    shuffled = [*partitions], [*workers], [*owners.items()]
    for part in shuffled:
        random.shuffle(part)
    assert balance(shuffled[0], shuffled[1], dict(shuffled[2])) == balance(partitions, workers, owners)


@given(situations())
def test_a_balanced_assignment_stays_unchanged(situation: Situation) -> None:
    partitions, workers, owners = situation
    answer = balance(partitions, workers, owners)
    assert balance(partitions, workers, answer) == answer


def test_the_partitions_of_a_stream_are_spread() -> None:
    partitions = [(stream, n) for stream in ("a", "b", "c") for n in range(4)]
    answer = balance(partitions, ["x", "y"], {})
    for stream in ("a", "b", "c"):
        assert Counter(answer[stream, n] for n in range(4)) == {"x": 2, "y": 2}


def test_many_small_streams_do_not_all_end_at_the_first_worker() -> None:
    answer = balance([(stream, 0) for stream in range(30)], ["x", "y", "z"], {})
    assert Counter(answer.values()) == {"x": 10, "y": 10, "z": 10}
