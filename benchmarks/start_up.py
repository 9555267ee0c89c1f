"""How long until the command line answers, and until a log of ten thousand log segments is open?

Back of the envelope: the interpreter takes 15 ms, click 40, our own modules 40. Opening a cleanly closed log lists
its folder (30 000 names, 30 ms) and makes ten thousand small objects (50 ms); no log segment is read.

    python benchmarks/start_up.py [--json]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import pyarrow as pa

from _report import Report, best_of, demand
from tidegate.files import Effect, Files
from tidegate.log.log import Log
from tidegate.log.producer_state import Origin
from tidegate.testing.batches import Rec, build_batch

LIMIT_SECONDS = 0.3
SEGMENTS = 10_000


def answer(folder: Path, *arguments: str) -> float:
    """Seconds of the fastest of five runs of one command."""

    def once() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "tidegate.cli.main", *arguments],
            capture_output=True,
            env={**os.environ, "TIDEGATE_LOG": str(folder)},
        )
        demand(done.returncode == 0, f"{arguments} ended with {done.returncode}: {done.stderr.decode()}")

    return best_of(5, once, perf_counter)


def many_segments(folder: Path) -> None:
    """A cleanly closed partition with ten thousand log segments, most of them copies of one."""
    with Log(folder, durability="os") as log:
        log.create_topic("many", 1, {"segment.bytes": "100"})
        log.writer("many", batch_records=1).write(pa.table({"value": [b"x"] * 3}))
        late = build_batch([Rec(value=b"late", timestamp=1)], base_offset=20_000, leader_epoch=0)
        log.partition("many", 0).append(late, origin=Origin.REPLICATION)
        log.partition("many", 0).acknowledge(sync=False)
    partition = folder / "many-0"
    for base in range(100, 100 + SEGMENTS):
        for suffix in ("log", "index", "timeindex"):
            shutil.copyfile(partition / f"{1:020d}.{suffix}", partition / f"{base:020d}.{suffix}")


def main() -> None:
    report = Report("How long until the command line answers, and until a large log is open?")
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name) / "log"
        with Log(folder) as log:
            log.create_topic("orders", 3)
        for arguments in (["--help"], ["topic", "list"], ["topic", "describe", "orders"]):
            seconds = answer(folder, *arguments)
            report.figure(
                f"tidegate {' '.join(arguments)}",
                f"{seconds * 1e3:.0f} ms",
                target=f"≤ {LIMIT_SECONDS * 1e3:.0f} ms",
                met=seconds <= LIMIT_SECONDS,
            )
        large = Path(name) / "large"
        many_segments(large)
        opened: list[Path] = []

        def watch(effect: Effect) -> None:
            if effect.kind in ("open", "read") and effect.path.suffix == ".log":
                opened.append(effect.path)

        def reopen() -> None:
            with Log(large, files=Files(watch), durability="os") as log:
                started = perf_counter()
                found = len(log.partition("many", 0).segments)
                took.append(perf_counter() - started)
                demand(found >= SEGMENTS, f"{found} log segments")
                demand(not opened, f"{len(opened)} log segments were read")
            opened.clear()

        took: list[float] = []
        best_of(3, reopen, perf_counter)
        report.figure(
            f"open {SEGMENTS:,} log segments", f"{min(took) * 1e3:.0f} ms", "none read", "none read", True
        )


if __name__ == "__main__":
    main()
