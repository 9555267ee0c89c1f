"""How fast does an Arrow table become batches, on one core?

Back of the envelope: a record of 100 bytes needs its sizes added up (8 ns), its fields and bytes written (20 ns)
and its CRC (4 ns): about 30 M records/s. Appending to a log with 6 M records/s leaves 130 ns a record for
everything else, of which writing 110 bytes to the page cache takes about 25.

Peers, in the same run: memory copy, and the builders of aiokafka (C) and kafka-python for the same rows.

    python benchmarks/append_codec.py [--full] [--json]
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa

from _report import MIB, Report, best_of, demand, events
from machine import memcpy_bytes_per_second
from tidegate.log.format.batch import Codec, stamp
from tidegate.log.format.decode import decode
from tidegate.log.format.encode import encode_with_facts


def encode_all(table: pa.Table, codec: Codec = Codec.NONE) -> int:
    return sum(len(batch) for batch, _ in encode_with_facts(table, max_batch_bytes=MIB, codec=codec))


def write_all(table: pa.Table, fd: int) -> int:
    """Encode, stamp and write each batch where the last one ended: an append without its log."""
    position = offset = 0
    for batch, _ in encode_with_facts(table, max_batch_bytes=MIB):
        offset = stamp(batch, base_offset=offset, leader_epoch=0).next_offset
        position += os.pwrite(fd, batch, position)
    return position


def build_all(builder: Any, rows: list[tuple[int, bytes]], batch_rows: int) -> list[bytes]:
    """The same rows through a peer's builder."""
    batches = []
    for start in range(0, len(rows), batch_rows):
        batch = builder(
            magic=2,
            compression_type=0,
            is_transactional=False,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            batch_size=2 * MIB,
        )
        for place, (timestamp, value) in enumerate(rows[start : start + batch_rows]):
            batch.append(place, timestamp, None, value, [])
        batches.append(bytes(batch.build()))
    return batches


def main() -> None:
    report = Report(__doc__.splitlines()[0])
    rows, repetitions = (4_000_000, 9) if report.full else (1_000_000, 5)
    table = events(rows)
    memcpy = memcpy_bytes_per_second()
    report.figure("memory copy", f"{memcpy / 1e9:.1f} GB/s")
    check(table)
    seconds = best_of(repetitions, lambda: encode_all(table))
    ours, ratio = rows / seconds, encode_all(table) / seconds / memcpy
    report.figure(
        "encode, 100-byte values, 1-MiB batches",
        f"{ours / 1e6:.1f} M records/s",
        f"{ratio:.2f} of memory copy",
        "≥ 10 M records/s",
        ours >= 10e6,
    )
    with tempfile.TemporaryDirectory(dir=".") as folder:
        fd = os.open(Path(folder) / "log", os.O_RDWR | os.O_CREAT)
        seconds = best_of(repetitions, lambda: write_all(table, fd), perf_counter)
        os.close(fd)
    report.figure(
        "the same, written to the page cache",
        f"{rows / seconds / 1e6:.1f} M records/s",
        "",
        "≥ 6 M records/s",
        rows / seconds >= 6e6,
    )
    peers(report, table.slice(0, rows // 10), ours)
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        some = table.slice(0, rows // 10)
        seconds = best_of(3, lambda some=some, codec=codec: encode_all(some, codec))
        report.figure(f"encode, {codec.label}", f"{some.num_rows / seconds / 1e6:.2f} M records/s")


def check(table: pa.Table) -> None:
    """Every row comes back, in order."""
    start = 0
    for batch, _ in encode_with_facts(table, max_batch_bytes=MIB):
        back = decode(batch, topic="t", partition=0)
        wanted = table.slice(start, back.num_rows)
        demand(back["value"].equals(wanted["value"].combine_chunks()), "a value is not the one given")
        start += back.num_rows
    demand(start == table.num_rows, "rows are missing")


def peers(report: Report, table: pa.Table, ours: float) -> None:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder as CBuilder
    from kafka.record.default_records import DefaultRecordBatchBuilder as PythonBuilder

    values = table["value"].to_pylist()
    rows = list(zip(table["timestamp"].to_pylist(), values, strict=True))
    for name, builder in (("aiokafka's C codec", CBuilder), ("kafka-python", PythonBuilder)):
        built = build_all(builder, rows, 9000)
        back = [decode(batch, topic="t", partition=0)["value"] for batch in built]
        demand(pa.chunked_array(back).to_pylist() == values, f"{name} writes other values")
        speed = len(rows) / best_of(3, lambda builder=builder: build_all(builder, rows, 9000))
        report.figure(
            f"the same by {name}",
            f"{speed / 1e6:.2f} M records/s",
            f"ours is {ours / speed:.1f} times faster",
        )


if __name__ == "__main__":
    main()
