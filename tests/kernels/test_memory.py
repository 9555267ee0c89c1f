"""The two lives of the memory functions: checked in plain Python, one operation when compiled."""

from typing import Any

import numpy as np
import pytest
from numba import njit

from tidegate.kernels.memory import copy, load, pointer, prefetch, store

KINDS = [np.uint8, np.int8, np.int16, np.int32, np.uint32, np.int64]


@njit
def compiled_load(array: Any, index: int) -> Any:
    return load(pointer(array), index)


@njit
def compiled_store(array: Any, index: int, value: int) -> None:
    store(pointer(array), index, value)


@njit
def compiled_copy(target: Any, into: int, source: Any, out_of: int, length: int) -> None:
    copy(pointer(target), into, pointer(source), out_of, length)


@njit
def compiled_prefetch(array: Any, index: int) -> None:
    prefetch(pointer(array), index)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_widen_and_keep_the_sign(kind: Any) -> None:
    limits = np.iinfo(kind)
    array = np.array([limits.min, 0, limits.max], kind)
    assert [compiled_load(array, i) for i in range(3)] == [limits.min, 0, limits.max]
    assert [load(array, i) for i in range(3)] == [limits.min, 0, limits.max]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0, 1, -1, 255, 2**31, -(2**63)])
def test_stores_keep_the_low_bits(kind: Any, value: int) -> None:
    plain, compiled = np.zeros(3, kind), np.zeros(3, kind)
    store(plain, 1, value)
    compiled_store(compiled, 1, value)
    assert plain.tolist() == compiled.tolist() == [0, np.array([value]).astype(kind)[0], 0]


def test_copies_move_exactly_the_bytes_asked_for() -> None:
    source = np.arange(10, dtype=np.uint8)
    plain, compiled = np.zeros(10, np.uint8), np.zeros(10, np.uint8)
    copy(plain, 2, source, 5, 3)
    compiled_copy(compiled, 2, source, 5, 3)
    assert plain.tolist() == compiled.tolist() == [0, 0, 5, 6, 7, 0, 0, 0, 0, 0]


def test_plain_python_refuses_to_leave_an_array() -> None:
    array = np.zeros(4, np.uint8)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            load(array, index)
        with pytest.raises(IndexError):
            store(array, index, 1)
    for into, out_of, length in ((-1, 0, 1), (0, -1, 1), (4, 0, 1), (0, 4, 1), (0, 0, 5), (0, 0, -1)):
        with pytest.raises(IndexError):
            copy(array, into, array.copy(), out_of, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 3, 4, -1, 2**40, -(2**40), 2**62])
def test_a_prefetch_changes_nothing_and_may_be_anywhere(kind: Any, index: int) -> None:
    array = np.arange(4, dtype=kind)
    prefetch(array, index)
    compiled_prefetch(array, index)
    assert array.tolist() == [0, 1, 2, 3]
