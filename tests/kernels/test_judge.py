"""The decision table's kernel: its numbers are the enums', its index finds producers, its rows grow.

That its verdicts are the scalar twin's is shown in tests/integrity/test_validator_twin.py.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tidegate.integrity.header import ControlType
from tidegate.integrity.state import Phase
from tidegate.integrity.verdicts import Note, Rule, Verdict
from tidegate.kernels import validation
from tidegate.kernels.validation import EMPTY, PRODUCER_ROW, find_producer, index_producers, is_supported

VERDICT_NAMES = {"IS_UNMANAGED": Verdict.UNMANAGED, "IS_HEARTBEAT": Verdict.HEARTBEAT}


def test_the_kernels_numbers_are_those_of_the_enums() -> None:
    for verdict in Verdict:
        name = {member: name for name, member in VERDICT_NAMES.items()}.get(verdict, verdict.name)
        assert getattr(validation, name) == verdict
    for rule in Rule:
        if rule is not Rule.NONE:
            assert getattr(validation, rule.name) == rule
    for note in Note:
        assert getattr(validation, note.name or "") == note
    for phase in Phase:
        assert getattr(validation, phase.name) == phase


def test_the_control_types_the_kernel_knows_are_those_of_the_header() -> None:
    known = {number for number in range(256) if is_supported({"kind": 2, "control": number})}
    assert known == {int(control) for control in ControlType}


def rows_with(guids: list[tuple[int, int]], capacity: int) -> Any:
    rows = np.zeros(capacity, PRODUCER_ROW)
    for number, (high, low) in enumerate(guids):
        rows[number]["guid_high"], rows[number]["guid_low"] = high, low
    return rows


def find(rows: Any, index: Any, guid: tuple[int, int]) -> int:
    return int(find_producer(rows, index, np.uint64(guid[0]), np.uint64(guid[1])))


@pytest.mark.parametrize("spread", ["random", "counting", "high half only", "low half only"])
def test_every_producer_is_found_and_nobody_else(spread: str) -> None:
    chance = random.Random(5)
    guids = {
        "random": [(chance.getrandbits(64), chance.getrandbits(64)) for _ in range(1000)],
        "counting": [(0, number) for number in range(1000)],
        "high half only": [(number << 40, 7) for number in range(1000)],
        "low half only": [(7, number << 50) for number in range(1000)],
    }[spread]
    rows = rows_with(guids, 1000)
    index = np.empty(2048, np.int32)
    index_producers(rows, 900, index)
    assert [find(rows, index, guid) for guid in guids[:900]] == list(range(900))
    assert {find(rows, index, guid) for guid in guids[900:]} == {EMPTY}
    assert int((index != EMPTY).sum()) == 900


def test_no_spread_of_guids_makes_the_index_slow() -> None:
    """The longest walk from a GUID's first place stays short even for GUIDs that only count."""
    for shift in (0, 8, 32, 50):
        rows = rows_with([(number << shift & 2**64 - 1, number) for number in range(4096)], 4096)
        index = np.empty(16384, np.int32)
        index_producers(rows, 4096, index)
        filled = index != EMPTY
        longest = run = 0
        for is_filled in filled.tolist():
            run = run + 1 if is_filled else 0
            longest = max(longest, run)
        assert longest < 64


def test_a_row_that_is_not_in_use_is_nobody() -> None:
    rows = rows_with([(1, 1)], 16)
    index = np.empty(64, np.int32)
    index_producers(rows, 1, index)
    assert find(rows, index, (1, 1)) == 0
    assert find(rows, index, (0, 0)) == EMPTY  # a free row of zeros is nobody
