"""The vector validator on real logs, hostile metadata and floods."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.integrity.header import Stamp
from tidegate.integrity.state import Manifest, PartitionState, Phase, Sent
from tidegate.integrity.validator import OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Verdict
from tidegate.log.log import Log

GOES_ON = ValidationRules(during_push=OnError.KEEP)


def push(streams: Any) -> list[Any]:
    """A whole push of one task, as one partition reads it."""
    driver, task = streams.Pen(1), streams.Pen(2)
    rows = [driver.start(), driver.start_push(), *task.chain_of(3)]
    sent = Sent(task.guid, 0, 4, task.checksum, 3)
    return [*rows, driver.end_push(Manifest((sent,))), driver.end()]


def faults(streams: Any, rows: list[Any]) -> list[Verdict]:
    judged = PartitionValidator("orders", 0, rules=GOES_ON).validate(streams.batch_of(rows), streams.NOW)
    return [Verdict(verdict) for verdict in judged.verdicts[judged.is_fatal].tolist()]


def test_what_a_sender_wrote_into_a_log_is_sound_and_kept(tmp_path: Path, streams: Any) -> None:
    table = pa.table({"key": [f"k{n}" for n in range(500)], "value": [b"x" * (n % 50) for n in range(500)]})
    with Log(tmp_path / "log") as log:
        log.create_topic("orders", 1)
        writer = log.writer("orders", integrity=True)
        for start in range(0, 500, 100):
            writer.write(table.slice(start, 100))
        writer.close()
        validator = PartitionValidator("orders", 0, rules=ValidationRules(strict=True))
        kept = 0
        for batch in log.reader("orders", control_records=True):
            judged = validator.validate(batch, streams.NOW)
            assert judged.counts[Verdict.OK] == batch.num_rows
            kept += int(judged.kept.sum())
    assert kept == 500
    (producer,) = validator.state.producers
    assert producer.ended and producer.final and producer.data_records == 500
    assert validator.state.next_offset == 502


def test_a_sound_push_has_no_fault(streams: Any) -> None:
    assert faults(streams, push(streams)) == []


@pytest.mark.parametrize("row", range(8))
def test_no_bit_of_a_header_can_change_unseen_during_a_push(streams: Any, row: int) -> None:
    rows = push(streams)
    sound = rows[row].stamp.to_bytes()
    for bit in range(8, 8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        damaged = [*rows[:row], rows[row]._replace(stamp=Stamp.from_bytes(bytes(data))), *rows[row + 1 :]]
        assert faults(streams, damaged), f"bit {bit} of the header of record {row}"


@pytest.mark.parametrize("row", range(9))
def test_no_bit_of_a_payload_key_or_value_can_change_unseen(streams: Any, row: int) -> None:
    rows = push(streams)
    for name in ("payload", "key", "value"):
        sound = getattr(rows[row], name) or b""
        stop = len(sound) - 4 if name == "key" and len(sound) == 33 else len(sound)  # the nonce is free
        for at in range(stop):
            data = sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :]
            damaged = [*rows[:row], rows[row]._replace(**{name: data}), *rows[row + 1 :]]
            assert faults(streams, damaged), f"byte {at} of the {name} of record {row}"


def live(streams: Any) -> list[Any]:
    """Two chains on a topic without a push."""
    pen = streams.Pen()
    return [pen.start(), *pen.puts(2), pen.put(b"k", None), pen.end(final=False), *pen.chain_of(1)]


def is_seen(streams: Any, rows: list[Any]) -> bool:
    """A fault; or, where the last record of all claims an earlier number, a repeat that leaves its chain open."""
    validator = PartitionValidator("orders", 0, rules=GOES_ON)
    judged = validator.validate(streams.batch_of(rows), streams.NOW)
    is_repeat = judged.verdicts[-1] == Verdict.DUPLICATE
    is_open = not any(producer.ended for producer in validator.state.producers)
    return bool(judged.is_fatal.any()) or (is_repeat and is_open)


@pytest.mark.parametrize("row", range(8))
def test_no_bit_of_any_metadata_can_change_unseen_on_a_live_topic(streams: Any, row: int) -> None:
    rows = live(streams)
    assert len(rows) == 8 and not faults(streams, rows)
    sound = rows[row]
    headers = [("div", sound.stamp.to_bytes()), *([("divc", sound.payload)] if sound.payload else [])]
    for number, (name, data) in enumerate(headers):
        for bit in range(8 * len(data)):
            bent = bytearray(data)
            bent[bit // 8] ^= 1 << bit % 8
            extra = [*headers]
            extra[number] = (name, bytes(bent))
            damaged = sound._replace(stamp=None, payload=None, extra=tuple(extra))
            assert is_seen(streams, [*rows[:row], damaged, *rows[row + 1 :]]), f"bit {bit} of {name}"
        for length in (0, 1, len(data) - 1, len(data) + 1):
            extra = [*headers]
            extra[number] = (name, data.ljust(length, b"\0")[:length])
            damaged = sound._replace(stamp=None, payload=None, extra=tuple(extra))
            assert is_seen(streams, [*rows[:row], damaged, *rows[row + 1 :]]), f"{name} of {length} bytes"


def test_with_a_manifest_no_record_before_the_end_of_push_can_be_lost_unseen(streams: Any) -> None:
    rows = push(streams)
    for lost in range(len(rows) - 2):
        assert faults(streams, rows[:lost] + rows[lost + 1 :]), f"record {lost}"
    for first in range(2, 6):
        assert faults(streams, rows[:first] + rows[7:]), f"records from {first}"


def test_hostile_headers_give_verdicts_and_never_an_error(streams: Any) -> None:
    chance = random.Random(11)
    sound = streams.Pen().chain_of(3)
    validator = PartitionValidator("orders", 0, rules=ValidationRules(max_producers=50))
    rows = []
    for _ in range(3000):
        row = chance.choice(sound)
        data = bytearray(row.stamp.to_bytes())
        for _ in range(chance.randint(0, 6)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 2, 127, 128, 255, chance.randrange(256)])
        length = chance.choice([40, 40, 40, 0, 39, 41, 200])
        extra = [("div", bytes(data).ljust(length, b"\0")[:length])] * chance.choice([1, 1, 1, 2])
        payload = chance.choice([None, row.payload, b"", b"\x01", b"\x01" * 22, b"\x02\x05"])
        rows.append(row._replace(stamp=None, payload=payload, extra=tuple(extra)))
    judged = validator.validate(streams.batch_of(rows), streams.NOW)
    assert len(judged.verdicts) == 3000
    assert set(judged.verdicts.tolist()) <= set(Verdict)
    assert len(validator.state.producers) <= 50
    assert all(str(finding) for finding in judged.findings)


def test_a_flood_of_producers_is_tracked_up_to_the_limit_and_found_again(streams: Any) -> None:
    starts = [streams.Pen().start() for _ in range(1)]
    batch = streams.batch_of(starts * 20_000)
    headers = batch.column("headers")
    values = headers.values.field("value")
    data = np.frombuffer(values.buffers()[2], np.uint8).copy()
    ends = np.frombuffer(values.buffers()[1], np.int32)[: len(values)]
    stamps = ends[::2]  # each record has a `div` and a `divc`
    for byte, shift in ((4, 0), (5, 8), (6, 16)):
        data[stamps + byte] = np.arange(20_000) >> shift & 255
    struct_type = headers.values.type
    value = pa.Array.from_buffers(pa.binary(), len(values), [None, values.buffers()[1], pa.py_buffer(data)])
    items = pa.StructArray.from_arrays([headers.values.field("key"), value], fields=list(struct_type))
    flooded = pa.ListArray.from_arrays(headers.offsets, items).cast(headers.type)
    batch = batch.set_column(batch.schema.get_field_index("headers"), batch.schema.field("headers"), flooded)
    validator = PartitionValidator("orders", 0, rules=ValidationRules(max_producers=15_000, payloads=False))
    judged = validator.validate(batch, streams.NOW)
    assert len(validator.state.producers) == 15_000
    again = validator.validate(_later(batch), streams.NOW)
    assert again.counts[Verdict.DUPLICATE] == 15_000
    assert len(judged.findings) == 1000 // 6, "the first of each kind"


def _later(batch: pa.RecordBatch) -> pa.RecordBatch:
    offsets = pa.array(np.arange(batch.num_rows) + 10**6)
    return batch.set_column(batch.schema.get_field_index("offset"), batch.schema.field("offset"), offsets)


def test_a_slice_of_a_batch_is_judged_like_a_batch_of_its_own(streams: Any) -> None:
    batch = streams.batch_of(streams.Pen().chain_of(8))
    validator = PartitionValidator("orders", 0, rules=GOES_ON)
    for start in range(0, 10, 3):
        judged = validator.validate(batch.slice(start, 3), streams.NOW)
        assert set(judged.verdicts.tolist()) == {Verdict.OK}


def test_an_empty_batch_changes_nothing(streams: Any) -> None:
    state = PartitionState(phase=Phase.PUSHING, next_offset=7)
    validator = PartitionValidator("orders", 0, state=state)
    judged = validator.validate(streams.batch_of([]), streams.NOW)
    assert len(judged.verdicts) == 0 and judged.stop_at is None
    assert validator.state == PartitionState(phase=Phase.PUSHING, next_offset=7)


def test_findings_are_a_sequence(streams: Any) -> None:
    pen = streams.Pen()
    rows = [pen.start(), *(row._replace(value=b"!") for row in pen.puts(3))]
    findings = PartitionValidator("orders", 0).validate(streams.batch_of(rows), streams.NOW).findings
    assert [finding.offset for finding in findings] == [1, 2, 3]
    assert (findings[-1].offset, [one.offset for one in findings[:2]]) == (3, [1, 2])
    with pytest.raises(IndexError):
        findings[3]
