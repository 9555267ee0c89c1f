"""How fast do batches become Arrow, with every CRC checked, on one core?

Back of the envelope: a record of 100 bytes takes 110 in the log. Its CRC is 4 ns, checking its fields and
copying it into Arrow 20 ns: about 40 M records/s, a third of the speed of memory copy. Compressed, the codec
dominates.

The log lies in memory and is decoded 8 MiB at a time, as a reader would fetch it; reading files is another
benchmark. Peers, in the same run: memory copy, aiokafka's C codec and kafka-python on the same bytes, and for
compressed logs cramjam decompressing the same streams into nothing.

    python benchmarks/scan.py [--full] [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import cramjam
import pyarrow as pa

from _report import MIB, Report, best_of, demand, events
from machine import memcpy_bytes_per_second
from tidegate.log.format.batch import Codec, stamp
from tidegate.log.format.compression import XERIAL_HEADER
from tidegate.log.format.decode import decode, scan_batches
from tidegate.log.format.encode import encode_with_facts

FETCH_BYTES = 8 * MIB


def log_of(table: pa.Table, codec: Codec, max_batch_records: int | None = None) -> bytes:
    log, offset = bytearray(), 0
    for batch, _ in encode_with_facts(
        table, max_batch_bytes=MIB, max_batch_records=max_batch_records, codec=codec
    ):
        offset = stamp(batch, base_offset=offset, leader_epoch=0).next_offset
        log += batch
    return bytes(log)


def fetches(log: bytes) -> list[memoryview]:
    """The log in pieces of whole batches, as `fetch` returns it."""
    headers = scan_batches(log)
    cuts, held = [0], 0
    for position, size in zip(headers.position.tolist(), headers.size.tolist(), strict=True):
        if held and held + size > FETCH_BYTES:
            cuts.append(position)
            held = 0
        held += size
    cuts.append(len(log))
    return [memoryview(log)[start:stop] for start, stop in pairwise(cuts)]


def scan(pieces: list[memoryview]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        yield decode(piece, topic="orders", partition=0)


def count(pieces: list[memoryview]) -> int:
    return sum(batch.num_rows for batch in scan(pieces))


def peer_values(records: Any) -> Iterator[Any]:
    while (batch := records.next_batch()) is not None:
        demand(batch.validate_crc(), "a peer finds a wrong CRC")
        for record in batch:
            yield record.value


def peer_count(memory_records: Callable[[bytes], Any], log: bytes) -> int:
    rows = 0
    for _ in peer_values(memory_records(log)):
        rows += 1
    return rows


def decompress_all(log: bytes, codec: Codec) -> int:
    """What cramjam needs for the same streams, keeping nothing."""
    headers, total = scan_batches(log), 0
    module = {Codec.GZIP: cramjam.gzip, Codec.LZ4: cramjam.lz4, Codec.ZSTD: cramjam.zstd}.get(codec)
    for position, size in zip(headers.position.tolist(), headers.size.tolist(), strict=True):
        stream = memoryview(log)[position + 61 : position + size]
        if module is not None:
            total += len(module.decompress(stream))
            continue
        place = len(XERIAL_HEADER)
        while place < len(stream):
            length = int.from_bytes(stream[place : place + 4], "big")
            total += len(cramjam.snappy.decompress_raw(stream[place + 4 : place + 4 + length]))
            place += 4 + length
    return total


def main() -> None:
    report = Report(__doc__.splitlines()[0])
    rows, repetitions = (4_000_000, 9) if report.full else (1_000_000, 5)
    table = events(rows)
    memcpy = memcpy_bytes_per_second()
    report.figure("memory copy", f"{memcpy / 1e9:.1f} GB/s")
    ours = plain(report, table, memcpy, repetitions)
    peers(report, table.slice(0, rows // 10), ours)
    packed(report, table, repetitions)
    small = log_of(table.slice(0, rows // 10), Codec.NONE, max_batch_records=1)
    seconds = best_of(repetitions, lambda: count(fetches(small)))
    report.figure("one record a batch", f"{rows / 10 / seconds / 1e6:.2f} M records/s")


def plain(report: Report, table: pa.Table, memcpy: float, repetitions: int) -> float:
    log = log_of(table, Codec.NONE)
    pieces = fetches(log)
    back = pa.Table.from_batches(scan(pieces))
    demand(back["value"].equals(table["value"]), "the values are not those written")
    demand(back["offset"].to_pylist()[-1] == table.num_rows - 1, "offsets are missing")
    del back
    seconds = best_of(repetitions, lambda: count(pieces))
    speed, ratio = table.num_rows / seconds, len(log) / seconds / memcpy
    report.figure(
        "scan, 100-byte values, no compression",
        f"{speed / 1e6:.1f} M records/s",
        f"{ratio:.2f} of memory copy",
        "≥ 0.15",
        ratio >= 0.15,
    )
    return speed


def peers(report: Report, table: pa.Table, ours: float) -> None:
    from aiokafka.record.memory_records import MemoryRecords as CRecords
    from kafka.record.memory_records import MemoryRecords as PythonRecords

    log = log_of(table, Codec.NONE)
    for name, reader, wanted in (
        ("aiokafka's C codec", CRecords, 4.0),
        ("kafka-python", PythonRecords, None),
    ):
        demand(list(peer_values(reader(log))) == table["value"].to_pylist(), f"{name} reads other values")
        speed = table.num_rows / best_of(3, lambda reader=reader: peer_count(reader, log))
        report.figure(
            f"the same by {name}",
            f"{speed / 1e6:.2f} M records/s",
            f"ours is {ours / speed:.1f} times faster",
            "" if wanted is None else f"≥ {wanted:.0f} times",
            None if wanted is None else ours >= wanted * speed,
        )


def packed(report: Report, table: pa.Table, repetitions: int) -> None:
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        log = log_of(table, codec)
        pieces = fetches(log)
        back = pa.Table.from_batches(scan(pieces))
        demand(back["value"].equals(table["value"]), f"{codec.label}: the values are not those written")
        del back
        theirs = best_of(repetitions, lambda log=log, codec=codec: decompress_all(log, codec))
        ours = best_of(repetitions, lambda pieces=pieces: count(pieces))
        report.figure(
            f"scan, {codec.label}, {100 * table.num_rows / len(log):.1f} times smaller",
            f"{table.num_rows / ours / 1e6:.1f} M records/s",
            f"{theirs / ours:.2f} of cramjam alone",
            "≥ 0.5",
            theirs / ours >= 0.5,
        )


if __name__ == "__main__":
    main()
