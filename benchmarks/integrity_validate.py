"""What does checking cost a consumer: metadata read, checksums recomputed, every record judged?

Back of the envelope: reading a 40-byte header through Arrow's lists 10 ns, the CRC-32 of 116 bytes 25 ns, one
row of state looked up and changed 10 ns: about 45 ns a record with recomputed checksums against 150 ns allowed,
20 ns when the headers are taken at their word against 40 ns. A checkpoint of 100,000 producers is 82 bytes each.

Peers, in the same run: the scalar twin (the readable form of the same rules) and memory copy. The twin is also
the oracle: its verdicts for the first rows must be the same.

    python benchmarks/integrity_validate.py [--full] [--json]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from _report import MIB, Report, best_of, demand, events
from machine import memcpy_bytes_per_second
from scalar_validator import Arrival, ScalarValidator
from tidegate.integrity.columns import IntegrityColumns, checksum_of, joined
from tidegate.integrity.sender import ChainLimits, Chains, ChainState
from tidegate.integrity.state import PartitionState, ProducerTable, decode_state, encode_state
from tidegate.integrity.validator import PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Verdict
from tidegate.kernels.validation import PRODUCER_ROW
from tidegate.log.format.records import RECORD_SCHEMA, coerce
from validation_rules import Observed

NOW_MS = 1_767_225_600_000
BATCH_ROWS = 20_000
ONE_CHAIN = ChainLimits(max_age=0, max_records=2**31 - 3, max_bytes="1TiB")
HEADS = ValidationRules(head_may_be_gone=True)


def batches(rows: int, value_bytes: int, producers: int, duplicates: float = 0.0) -> list[pa.RecordBatch]:
    """Records as the log hands them out: producers take turns, some records come again."""
    digits = np.char.zfill((np.arange(rows) * 7919 % 1_000_000).astype("U6"), 6)
    table = events(rows, value_bytes).append_column("key", pa.array(np.char.add("order-", digits)))
    columns = coerce(table)
    share = rows // producers
    pieces = []
    for number in range(producers):
        chains = Chains(bytes([number + 1]) * 16, limits=ONE_CHAIN)
        pieces += chains.data(ChainState(), columns.slice(number * share, share), NOW_MS).pieces
    whole = joined(pieces)
    place = np.concatenate([np.arange(-1, share) * producers + number for number in range(producers)])
    order = np.argsort(place, kind="stable")
    if duplicates:
        again = np.random.default_rng(1).random(len(order)) < duplicates
        order = np.repeat(order, 1 + again)
    return [
        _batch(whole, order[start : start + BATCH_ROWS], start) for start in range(0, len(order), BATCH_ROWS)
    ]


def _batch(columns: object, order: np.ndarray, first: int) -> pa.RecordBatch:
    chosen = pa.array(order)
    count = len(order)
    topic = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array(["orders"]))
    arrays = [
        topic,
        pa.array(np.zeros(count, np.int32)),
        pa.array(np.arange(first, first + count)),
        columns.timestamp.take(chosen).view(RECORD_SCHEMA.field("timestamp").type),  # type: ignore[attr-defined]
        columns.key.take(chosen),  # type: ignore[attr-defined]
        columns.value.take(chosen),  # type: ignore[attr-defined]
        columns.headers.take(chosen),  # type: ignore[attr-defined]
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)


def seconds_per_record(given: list[pa.RecordBatch], rules: ValidationRules, repetitions: int) -> float:
    """Each batch's best time, added up: on a shared machine long runs are always disturbed."""
    state, total = PartitionState(), 0.0
    for batch in given:
        fastest = float("inf")
        for _ in range(repetitions):
            validator = PartitionValidator("orders", 0, rules=rules, state=state.copy())
            fastest = min(fastest, best_of(1, partial(validator.validate, batch, NOW_MS)))
        total += fastest
        state = validator.state
    return total / sum(batch.num_rows for batch in given)


def check(given: list[pa.RecordBatch], expected_duplicates: bool) -> float:
    """The scalar twin says the same of the first batch; answers its seconds a record."""
    batch = given[0]
    judged = PartitionValidator("orders", 0, rules=HEADS).validate(batch, NOW_MS)
    demand(not judged.is_fatal.any(), "a sound stream has faults")
    demand((judged.counts[Verdict.DUPLICATE] > 0) == expected_duplicates, "duplicates")
    keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
    found: list[int] = []
    seconds = best_of(1, lambda: found.extend(_plain(judged.columns, keys, values)))
    demand(found == judged.verdicts.tolist(), "the scalar twin says something else")
    return seconds / batch.num_rows


def _plain(columns: IntegrityColumns, keys: list[bytes], values: list[bytes]) -> list[int]:
    validator, found = ScalarValidator(HEADS), []
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        stamp = columns.stamp(row)
        crc = stamp.crc if stamp.kind == 2 else checksum_of(stamp, key, value, None)
        announced = int(columns.rows[row]["announced_type"])
        observed = Observed(stamp, row, NOW_MS, computed_crc=crc, announced_type=announced)
        found.append(int(validator.look(Arrival(row, observed), NOW_MS).verdict))
    return found


def measure_validation(report: Report, rows: int, copy_speed: float) -> None:
    repetitions = 20 if report.full else 10
    cheap = ValidationRules(head_may_be_gone=True, payloads=False)
    for what, size, share, producers, duplicates, rules, limit in (
        ("recomputed, 100 bytes, clean", 100, 1, 4, 0.0, HEADS, 150),
        ("recomputed, 100 bytes, 10 % duplicates", 100, 1, 4, 0.1, HEADS, 250),
        ("recomputed, 100 bytes, 200 producers", 100, 1, 200, 0.0, HEADS, 150),
        ("headers' sums, 100 bytes, clean", 100, 1, 4, 0.0, cheap, 40),
        ("recomputed, 1-KB values", 1024, 8, 4, 0.0, HEADS, None),
    ):
        given = batches(rows // share, size, producers, duplicates)
        plain = check(given, duplicates > 0)
        seconds = seconds_per_record(given, rules, repetitions)
        ratio = f"{plain / seconds:.0f}x the scalar twin"
        if limit is not None:
            met = seconds * 1e9 <= limit
            report.figure(what, f"{seconds * 1e9:.0f} ns/record", ratio, f"<= {limit} ns/record", met)
        else:
            speed = size / seconds
            ratio = f"{speed / copy_speed:.2f} of memory copy"
            report.figure(what, f"{speed / 1e9:.1f} GB/s", ratio, ">= 1 GB/s", speed >= 1e9)


def measure_checkpoint(report: Report) -> None:
    rows = np.zeros(100_000, PRODUCER_ROW)
    generator = np.random.default_rng(3)
    for name in ("guid_high", "guid_low", "checksum", "stamp_sum"):
        rows[name] = generator.integers(0, 2**63, len(rows), dtype=np.uint64)
    for name in ("records", "data_records", "sequence"):
        rows[name] = generator.integers(1, 10**6, len(rows))
    rows["producer_time"] = rows["log_time"] = NOW_MS
    rows["registered"], rows["checksum_type"] = 1, 5
    state = PartitionState(ProducerTable(rows))
    data = encode_state(state)
    demand(decode_state(data) == state, "a checkpoint does not come back")
    seconds = best_of(5, lambda: encode_state(state))
    figure, target = f"{seconds * 1000:.0f} ms", "< 1 s"
    report.figure("checkpoint 100,000 producers", figure, "", target, seconds < 1)
    size = len(data) / MIB
    report.figure("… size", f"{size:.1f} MiB", "", "< 20 MiB", size < 20)
    seconds = best_of(5, lambda: decode_state(data))
    report.figure("… restore", f"{seconds * 1000:.0f} ms")


def main() -> None:
    report = Report("What does checking cost a consumer?")
    rows = 1_000_000 if report.full else 200_000
    measure_validation(report, rows, memcpy_bytes_per_second(repetitions=3))
    measure_checkpoint(report)


if __name__ == "__main__":
    main()
