"""Sketches of distinct values against a plain twin: bytes, merging, and how good they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels import aggregates as kernels

FORMS = pytest.mark.parametrize("form", ["compiled", "checked"])


def run(form: str, kernel: Any, *arguments: Any) -> Any:
    return (kernel if form == "compiled" else kernel.py_func)(*arguments)


def registers_of(hashes: list[int]) -> dict[int, int]:
    """The twin: register → longest run of zeros + 1."""
    found: dict[int, int] = {}
    for number in hashes:
        rest = format(number & ((1 << 52) - 1), "052b")
        value = len(rest) - len(rest.lstrip("0")) + 1
        found[number >> 52] = max(found.get(number >> 52, 0), value)
    return found


def bytes_of(registers: dict[int, int]) -> bytes:
    if 3 * len(registers) + 1 <= 4096:
        entries = (((place << 6) | value).to_bytes(3, "big") for place, value in sorted(registers.items()))
        return b"\x01" + b"".join(entries)
    return b"\x02" + bytes(registers.get(place, 0) for place in range(4096))


def sketch(form: str, groups: list[list[int]]) -> list[bytes]:
    hashes = np.array([number for group in groups for number in group], np.uint64)
    starts = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    ends, content = np.empty(len(groups) + 1, np.int32), np.empty(4097 * len(groups), np.uint8)
    scratch = np.zeros(4096, np.uint8)
    run(form, kernels.sketch_hashes, hashes, np.arange(len(hashes)), starts, scratch, ends, content)
    assert not scratch.any(), "registers are given back as they came"
    return [content[ends[at] : ends[at + 1]].tobytes() for at in range(len(groups))]


def merge(form: str, groups: list[list[bytes]]) -> list[bytes]:
    states = [state for group in groups for state in group]
    data = np.frombuffer(b"".join(states), np.uint8)
    bounds = np.cumsum([0, *map(len, states)], dtype=np.int32)
    starts = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    ends, content = np.empty(len(groups) + 1, np.int32), np.empty(len(data) + len(groups), np.uint8)
    scratch = np.zeros(4096, np.uint8)
    wrong = run(
        form, kernels.merge_sketches, data, bounds, np.arange(len(states)), starts, scratch, ends, content
    )
    assert wrong == -1
    return [content[ends[at] : ends[at + 1]].tobytes() for at in range(len(groups))]


def estimate(form: str, states: list[bytes]) -> list[float]:
    numbers = np.empty(len(states), np.float64)
    bounds = np.cumsum([0, *map(len, states)], dtype=np.int32)
    data = np.frombuffer(b"".join(states), np.uint8)
    assert run(form, kernels.estimate_sketches, data, bounds, numbers) == -1
    return numbers.tolist()


HASH = st.integers(0, 2**64 - 1) | st.integers(0, 4096).map(lambda place: place << 51)


@FORMS
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(HASH, max_size=60), max_size=4))
def test_bytes_equal_the_twins_and_merging_equals_making(form: str, groups: list[list[int]]) -> None:
    states = sketch(form, groups)
    assert states == [bytes_of(registers_of(group)) for group in groups]
    every = [number for group in groups for number in group]
    assert merge(form, [states, states[::-1], []]) == [*sketch(form, [every, every]), b"\x01"]


@pytest.mark.parametrize("size", [1365, 1366, 1400])
def test_the_form_changes_at_one_number_of_registers(size: int) -> None:
    hashes = [place << 52 for place in range(size)]
    (made,) = sketch("compiled", [hashes])
    assert made == bytes_of(registers_of(hashes))
    assert made[0] == (1 if size < 1366 else 2)
    assert merge("compiled", [sketch("compiled", [hashes[:700], hashes[700:]])]) == [made]


@pytest.mark.parametrize("count", [0, 1, 10, 100, 1_000, 10_000, 100_000])
def test_estimates_are_within_the_stated_error(count: int) -> None:
    """Forty sets of each size: the mean is unbiased and the deviation is the standard error, about."""
    chance = np.random.default_rng(count)
    found = []
    for _ in range(40):
        hashes = np.unique(chance.integers(0, 2**64, count, dtype=np.uint64)).tolist()
        found += estimate("compiled", sketch("compiled", [hashes]))
    if count == 0:
        assert found == [0.0] * 40
        return
    errors = np.array(found) / count - 1
    assert abs(errors.mean()) < 3 * 0.0163 / 40**0.5 + 0.001
    assert errors.std() < 1.4 * 0.0163
    assert np.abs(errors).max() < max(4 * 0.0163, 1.01 / count), "two values in one register cost one"


@FORMS
def test_estimates_need_no_more_than_the_bytes(form: str) -> None:
    chance = np.random.default_rng(1)
    groups = [chance.integers(0, 2**64, size, dtype=np.uint64).tolist() for size in (3, 60, 2500)]
    assert estimate(form, sketch("compiled", groups)) == pytest.approx([3, 60, 2500], rel=0.05)


@FORMS
@pytest.mark.parametrize(
    "state",
    [
        b"\x03", b"\x01\0", b"\x01\0\0", b"\x01\0\0\0", b"\x01\x04\0\x01", b"\x01\0\0\x3f", b"\x02",
        b"\x02" + b"\x40" * 4096,
    ],
    ids=lambda state: state[:4].hex(),
)  # fmt: skip
def test_bytes_that_are_no_sketch_are_refused(form: str, state: bytes) -> None:
    data, bounds = np.frombuffer(state, np.uint8), np.array([0, len(state)], np.int32)
    assert run(form, kernels.estimate_sketches, data, bounds, np.empty(1, np.float64)) == 0
    ends, content = np.empty(2, np.int32), np.empty(len(state) + 1, np.uint8)
    one, starts = np.zeros(1, np.int64), np.array([0, 1], np.int64)
    scratch = np.zeros(4096, np.uint8)
    assert run(form, kernels.merge_sketches, data, bounds, one, starts, scratch, ends, content) == 0
