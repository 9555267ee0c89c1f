"""DIV-49: vector and scalar validator agree on damaged streams, wherever they are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from damaged_streams import LAG, damage, sound_rows
from scalar_validator import ScalarValidator
from tidegate.integrity.state import decode_state, encode_state
from tidegate.integrity.validator import OnError, ValidationRules
from tidegate.integrity.verdicts import FATAL, Note, Rule, Tolerance

STREAMS = 2_400
GROUPS = 12


def bound_of(chance: random.Random) -> Callable[[], int] | None:
    bound = chance.choice([None, None, 0, chance.randrange(40)])
    return None if bound is None else lambda: bound


def rules_of(chance: random.Random) -> ValidationRules:
    actions = list(OnError)
    mixed = {verdict: chance.choice(actions) for verdict in FATAL if chance.random() < 0.7}
    lag = chance.choice([-1, -1, 0, LAG])
    return ValidationRules(
        during_push=chance.choice([*actions, mixed]),
        otherwise=chance.choice([OnError.KEEP, *actions, mixed, mixed]),
        tolerance=Tolerance(
            lag, chance.choice(["previous", "incoming"]), chance.random() < 0.1, bound_of(chance)
        ),
        head_may_be_gone=chance.random() < 0.3,
        strict=chance.random() < 0.2,
        batch_only=chance.random() < 0.3,
        payloads=chance.random() < 0.8,
        max_producers=chance.choice([2, 3, 1000, 1000]),
    )


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("row", ["DIV-49"])
def test_vector_equals_scalar_on_damaged_streams_cut_anywhere(row: str, streams: Any, group: int) -> None:
    chance = random.Random(group)
    for _ in range(STREAMS // GROUPS):
        rows = sound_rows(streams, chance, early_end=True)
        for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 8])):
            damage(streams, chance, rows)
        both = streams.Both(rules_of(chance))
        while rows:  # a partition that stopped is resumed behind the record that stopped it
            cuts = [chance.randrange(len(rows) + 1) for _ in range(chance.randint(0, 3))]
            judged = both.feed(rows, cuts)
            rows = rows[len(judged) :]


def test_the_damaged_streams_reach_every_row_of_the_decision_table(streams: Any) -> None:
    chance, rules, notes = random.Random(3), set(), Note.NONE
    for _ in range(1500):
        rows = sound_rows(streams, chance, early_end=True)
        for _ in range(chance.choice([1, 2, 3, 8])):
            damage(streams, chance, rows)
        validator = ScalarValidator(rules_of(chance))
        for arrival in streams.arrivals(rows):
            found = validator.look(arrival, streams.NOW)
            rules.add(found.rule)
            notes |= found.note
    assert rules == set(Rule)
    assert notes == ~Note.NONE


@pytest.mark.parametrize("seed", range(6))
def test_sound_streams_raise_nothing_wherever_they_are_cut(streams: Any, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        rows = sound_rows(streams, chance)
        cuts = [chance.randrange(len(rows) + 1) for _ in range(3)]
        found = streams.Both(ValidationRules(head_may_be_gone=True)).feed(rows, cuts)
        assert not [one for one in found if one.verdict.is_fatal]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("row", ["DIV-26"])
def test_a_checkpoint_at_every_record_restored_and_continued_ends_in_the_same_state(
    row: str, streams: Any, seed: int
) -> None:
    chance = random.Random(seed)
    rows = sound_rows(streams, chance)
    for _ in range(seed // 2):
        damage(streams, chance, rows)
    rules = ValidationRules(during_push=OnError.KEEP)
    whole = streams.Both(rules)
    expected = whole.feed(rows)
    for cut in range(len(rows) + 1):
        first = streams.Both(rules)
        found = first.feed(rows[:cut])
        restored = decode_state(encode_state(first.vector.state))
        rest = streams.Both(rules, restored)
        assert found + rest.feed(rows[cut:]) == expected
        assert rest.vector.state == whole.vector.state
