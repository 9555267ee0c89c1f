"""Chance as a port: the same seed gives the same run."""

from __future__ import annotations

import pytest

from tidegate.randomness import Randomness, SeededRandomness, SystemRandomness


@pytest.mark.parametrize("source", [SystemRandomness(), SeededRandomness(1)])
def test_numbers_stay_below_their_limit_and_reach_all_of_it(source: Randomness) -> None:
    assert {source.below(3) for _ in range(300)} == {0, 1, 2}
    assert source.below(1) == 0


@pytest.mark.parametrize("source", [SystemRandomness(), SeededRandomness(1)])
def test_uuids_are_random_ones_and_differ(source: Randomness) -> None:
    made = {source.uuid() for _ in range(100)}
    assert len(made) == 100
    assert {one.version for one in made} == {4}


def test_a_seed_fixes_the_sequence() -> None:
    one, two, other = SeededRandomness(7), SeededRandomness(7), SeededRandomness(8)
    drawn = [(source.below(10**9), source.uuid()) for source in (one, two, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert one.seed == 7


def test_the_sequence_of_a_seed_is_the_same_on_every_machine() -> None:
    source = SeededRandomness(0)
    assert [source.below(100) for _ in range(5)] == [49, 97, 53, 5, 33]
