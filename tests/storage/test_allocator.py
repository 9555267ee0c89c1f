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


COUNT_HEAPS = """
import ctypes, sys, threading
from tidegate.storage.memory.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
places, here = [], threading.Barrier(4)

def take():
    here.wait()  # all of them at once, so that none waits for a heap that another has left
    places.append(libc.malloc(ctypes.c_size_t(100_000)))
    here.wait()

threads = [threading.Thread(target=take) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
with open("/proc/self/maps") as maps:
    start, end = next(line for line in maps if "[heap]" in line).split()[0].split("-")
print(sum(int(start, 16) <= place < int(end, 16) for place in places))
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


@pytest.mark.skipif(not keep_freed_memory(), reason="a C library without mallopt: nothing is promised")
def test_threads_share_one_heap() -> None:
    def shared(kept: str) -> int:
        command = [sys.executable, "-c", COUNT_HEAPS, kept]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert (shared("kept"), shared("left")) == (4, 0)


def test_asking_twice_is_asking_once() -> None:
    assert keep_freed_memory() is keep_freed_memory()
