"""How fast is this machine, so that other figures mean something elsewhere?

Copying memory is the yardstick: what scans and writes bytes can at best be some share of it. Back of the
envelope: one core with two channels of DDR4 or DDR5 copies 8 to 15 GB/s of large arrays.

    python benchmarks/machine.py
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from _report import MIB, Report, best_of, demand, load_line


def memcpy_bytes_per_second(size: int = 256 * MIB, repetitions: int = 7) -> float:
    """Bytes copied a second, of arrays larger than any cache."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    seconds = best_of(repetitions, lambda: np.copyto(target, source))
    demand(bool(target.min() == 1), "the copy is not the original")
    return size / seconds


def fsync_seconds(folder: Path) -> float:
    """Seconds of one fsync after 4 KiB were written."""
    fd = os.open(folder / "probe", os.O_RDWR | os.O_CREAT)
    try:

        def once() -> None:
            os.pwrite(fd, bytes(4096), 0)
            os.fsync(fd)

        return best_of(20, once, perf_counter)
    finally:
        os.close(fd)


def main() -> None:
    report = Report("How fast is this machine?")
    report.figure("processor", processor(), f"{os.cpu_count()} cores", load_line())
    report.figure("memory copy, one core", f"{memcpy_bytes_per_second() / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        report.figure("fsync of 4 KiB", f"{fsync_seconds(Path(folder)) * 1e3:.2f} ms")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
