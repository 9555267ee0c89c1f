"""How fast is a log compacted, compared with only reading it?

Back of the envelope: compaction reads the dirty part twice (to map its keys, then to filter), so it can be at
best half as fast as a scan. On top, per record and pass: the fingerprint of a 16-byte key 25 ns, a probe into a
table larger than the cache 20 ns, a handful of vector operations 15 ns. With a scan at 90 ns a record that is
2 × (90 + 60) = 300 ns, plus writing what remains: 3 M records/s, between a quarter and a third of the scan.

Each log holds 100-byte values under 16-byte keys, every key ten times. The scan decodes the same files with every
CRC checked, in pieces of the same size, in the same run. The survivors of each compaction are compared with the
last occurrence of each key, found by sorting. Times are CPU seconds: a compaction also waits for its syncs, which
says more about the disk than about the code.

    python benchmarks/compaction.py [--full] [--json]
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pyarrow as pa

from _report import MIB, Report, demand, events
from tidegate.clock import SystemClock
from tidegate.files import Files
from tidegate.log.compaction import Cleaner, CompactionReport
from tidegate.log.compaction_plan import Limits, cleanable
from tidegate.log.format.batch import Codec
from tidegate.log.format.decode import decode_pieces, scan_batches
from tidegate.log.format.encode import encode_with_facts
from tidegate.log.partition import PartitionLog
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler

PIECE_BYTES = 4 * MIB
OCCURRENCES = 10


@dataclass(frozen=True)
class Case:
    """One log; a target is a share of the scan's speed."""

    what: str
    batch_records: int | None
    codec: Codec = Codec.NONE
    share_of_rows: float = 1.0
    target: float | None = None


CASES = (
    Case("1 MiB batches", None, target=0.2),
    Case("batches of 100 records", 100, target=0.15),
    Case("batches of one record", 1, share_of_rows=0.2),
    Case("1 MiB batches, zstd", None, Codec.ZSTD, share_of_rows=0.5),
)


def keyed_events(rows: int) -> tuple[pa.Table, np.ndarray[Any, Any]]:
    """Events under keys in random order, and for each row which key it has."""
    numbers = np.random.default_rng(11).permutation(np.arange(rows) % (rows // OCCURRENCES))
    text = np.char.mod("key-%012d", numbers).astype("S16")
    ends = np.arange(rows + 1, dtype=np.int32) * 16
    keys = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(text.tobytes())])
    return events(rows).append_column("key", keys), numbers


def open_log(folder: Path) -> PartitionLog:
    clock = SystemClock()
    return PartitionLog.open(
        folder / "events-0",
        TopicConfig(
            cleanup_policy=frozenset({"compact"}), segment_bytes=256 * MIB, max_message_bytes=2 * MIB
        ),
        broker=BrokerConfig(),
        files=Files(),
        clock=clock,
        randomness=SeededRandomness(1),
        scheduler=ManualScheduler(clock),
        clean=False,
        recovery="kafka",
    )


def scan(log: PartitionLog) -> int:
    """Decode every record of every segment; how many there were."""
    records = 0
    for segment in log.segments:
        with segment.reader() as file:
            position, size = 0, segment.size
            while position < size:
                buffer = file.read_at(position, min(PIECE_BYTES, size - position))
                end = scan_batches(buffer).end
                for piece in decode_pieces(memoryview(buffer)[:end], topic="events", partition=0):
                    records += piece.num_rows
                position += end
    return records


def compact(log: PartitionLog) -> CompactionReport:
    part = cleanable(
        log.segments,
        checkpoint=None,
        log_start=0,
        log_end=log.log_end_offset,
        last_stable=log.last_stable_offset,
        limits=Limits(),
        now_ms=SystemClock().now_ms(),
    )
    return Cleaner(files=Files(), clock=SystemClock(), randomness=SeededRandomness(2)).clean(log, part)


def survivors(log: PartitionLog) -> np.ndarray[Any, Any]:
    """The offsets that remain, in order."""
    offsets = []
    for segment in log.segments:
        for piece in decode_pieces(segment.read_at(0, segment.size), topic="events", partition=0):
            offsets.append(piece.column("offset").to_numpy())
    return np.concatenate(offsets)


def measure(report: Report, case: Case, rows: int) -> None:
    rows = max(int(rows * case.share_of_rows), 10 * OCCURRENCES)
    table, numbers = keyed_events(rows)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        log = open_log(Path(folder))
        for batch, _ in encode_with_facts(
            table, max_batch_bytes=MIB, max_batch_records=case.batch_records, codec=case.codec
        ):
            log.append(batch)
        log.acknowledge(sync=False)
        log.roll()
        log.flush()
        size = log.size
        seconds = float("inf")
        for _ in range(3):
            started = process_time()
            demand(scan(log) == rows, "the scan lost records")
            seconds = min(seconds, process_time() - started)
        started = process_time()
        done = compact(log)
        compaction_seconds = process_time() - started
        last_of_each = rows - 1 - np.unique(numbers[::-1], return_index=True)[1]
        demand(np.array_equal(survivors(log), np.sort(last_of_each)), "other records survived")
        demand(done.records_after == rows // OCCURRENCES, "the report counts otherwise")
        log.close()
    ratio = seconds / compaction_seconds
    figure = f"{rows / compaction_seconds / 1e6:.2f} M records/s"
    report.figure(
        f"{case.what}, {size / MIB:.0f} MiB",
        figure,
        f"{ratio:.2f} of a scan ({rows / seconds / 1e6:.1f} M/s)",
        "" if case.target is None else f"{case.target} of a scan",
        None if case.target is None else ratio >= case.target,
    )


def main() -> None:
    report = Report("How fast is a log compacted, compared with only reading it?")
    for case in CASES:
        measure(report, case, 4_000_000 if report.full else 1_000_000)


if __name__ == "__main__":
    main()
