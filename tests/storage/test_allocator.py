"""Freed memory stays with the process for the next batch, up to a bound, and very large pieces go back at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tidegate.storage.memory.allocator import KEPT_BYTES, MAPPED_BYTES, keep_freed_memory

COUNT_FAULTS = """
import resource, sys
import numpy as np
from tidegate.storage.memory.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()

def batch(sizes):
    columns = [np.ones(size >> 3) for size in sizes]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del columns
    again = [np.ones(size >> 3) for size in sizes]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

sizes = [int(size) for size in sys.argv[2:]]
print(min(batch(sizes) for _ in range(3)))
"""


def faults(kept: str, *sizes: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, kept, *map(str, sizes)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="a C library without mallopt: nothing is promised")
def test_the_next_batch_finds_the_memory_of_the_last_one() -> None:
    columns = [3 << 20] * (KEPT_BYTES // 2 // (3 << 20))
    assert faults("kept", *columns) < faults("left", *columns) / 4


@pytest.mark.skipif(not keep_freed_memory(), reason="a C library without mallopt: nothing is promised")
def test_very_large_columns_go_back_at_once() -> None:
    assert faults("kept", MAPPED_BYTES * 2) > 16  # even in pages of 2 MiB


def test_asking_twice_is_asking_once() -> None:
    assert keep_freed_memory() is keep_freed_memory()
