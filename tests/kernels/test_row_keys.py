"""The key of every row, as a loop in Python would write it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidegate.kernels.run_merge import count_key_bytes, spread_keys
from tidegate.storage.runs.columns import binary_parts, row_keys


@pytest.mark.parametrize("seed", range(20))
def test_every_row_gets_its_key(seed: int) -> None:
    chance = np.random.default_rng(seed)
    lengths = chance.integers(0, [3, 12, 20, 60][seed % 4] + 1, 40)
    names = [chance.bytes(length) for length in lengths]
    counts = chance.integers(1, 9, len(names))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    expected = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    keys = pa.array([b"before", *names, b"after"], pa.binary()).slice(1, len(names))
    for first, stop in [
        (0, len(expected)),
        *np.sort(chance.integers(0, len(expected) + 1, (30, 2))).tolist(),
    ]:
        assert row_keys(keys, starts, first, stop).to_pylist() == expected[first:stop]


def test_keys_without_rows_are_passed_over() -> None:
    keys = pa.array([b"a", b"none", b"b", b"none either", b""], pa.binary())
    starts = np.array([0, 2, 2, 3, 3, 4], np.int32)
    assert row_keys(keys, starts, 0, 4).to_pylist() == [b"a", b"a", b"b", b""]
    assert row_keys(keys, starts, 2, 4).to_pylist() == [b"b", b""]
    assert row_keys(keys, starts, 3, 3).to_pylist() == []


def test_compiled_and_plain_python_agree() -> None:
    keys = pa.array([b"k" * length for length in (1, 8, 13, 32, 33)], pa.binary())
    data, bounds = binary_parts(keys)
    starts = np.array([0, 1, 3, 4, 6, 7], np.int32)
    for first, stop, line in ((0, 7, 0), (2, 6, 1)):
        results = []
        for count, spread in (
            (count_key_bytes, spread_keys),
            (count_key_bytes.py_func, spread_keys.py_func),
        ):
            size = count(bounds, starts, line, first, stop)
            target, ends = np.zeros(size, np.uint8), np.zeros(stop - first + 1, np.int32)
            assert spread(data, bounds, starts, line, first, stop, target, ends) == size
            results.append((size, target.tobytes(), ends.tolist()))
        assert results[0] == results[1]
