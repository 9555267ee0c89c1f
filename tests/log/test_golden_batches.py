"""Batches a real broker stored: read as its own tool read them, and written again to the same bytes."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest
from kafka_home import FIXTURES
from raw_batches import stored_batches
from recorded import answers, names

from batch_checks import check_batch
from tidegate.log.format.batch import Codec, TimestampType, stamp
from tidegate.log.format.decode import decode, scan_batches
from tidegate.log.format.encode import ProducerStamp, encode

RECORD = re.compile(
    r"\| offset: (\d+) (?:CreateTime|LogAppendTime): (-?\d+) keySize: (-?\d+) valueSize: (-?\d+)"
    r" sequence: -?\d+ headerKeys: \[(.*)\](?: endTxnMarker.*)?$"
)
TOPICS = [("folders", topic) for topic in names("folders")] + [
    ("restarts", topic) for topic in ("epochs", "trimmed")
]


def read_all(part: str, topic: str) -> pa.Table:
    logs = sorted((FIXTURES / part / f"{topic}-0").glob("*.log"))
    batches = [decode(log.read_bytes(), topic=topic, partition=0, control="include") for log in logs]
    return pa.Table.from_batches(batches)


@pytest.mark.parametrize(("part", "topic"), TOPICS)
def test_records_are_read_as_kafkas_own_tool_reads_them(part: str, topic: str) -> None:
    out, _ = answers(part, topic, "deep")
    wanted = [match.groups() for line in out.splitlines() if (match := RECORD.match(line))]
    found = [
        (
            str(row["offset"]),
            str(-1 if row["timestamp"] is None else row["timestamp"]),
            str(-1 if row["key"] is None else len(row["key"])),
            str(-1 if row["value"] is None else len(row["value"])),
            ",".join(header["key"] for header in row["headers"]),
        )
        for row in as_rows(read_all(part, topic))
    ]
    assert found == wanted


def as_rows(table: pa.Table) -> list[dict[str, object]]:
    times = table.column("timestamp").cast(pa.int64())
    return table.set_column(table.schema.get_field_index("timestamp"), "timestamp", times).to_pylist()


@pytest.mark.parametrize(("part", "topic"), TOPICS)
def test_plain_batches_are_written_again_to_the_same_bytes(part: str, topic: str) -> None:
    plain = 0
    for head, raw in stored_batches(FIXTURES / part / f"{topic}-0"):
        header = check_batch(raw)
        assert header.pack() == raw[:61]
        if header.codec is not Codec.NONE or header.is_control or header.count == 0:
            continue
        if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
            continue  # the producer's own times stay in the bytes, but no reader is shown them
        plain += 1
        again = encode(
            decode(raw, topic=topic, partition=0),
            producer=ProducerStamp(
                head.producer_id, head.producer_epoch, head.base_sequence, header.is_transactional
            ),
        )
        stamp(again, base_offset=head.base_offset, leader_epoch=head.leader_epoch)
        assert bytes(again) == raw, f"batch at offset {head.base_offset}"
    assert plain or topic.startswith(("recoded", "empty", "append-time"))


@pytest.mark.parametrize("topic", names("folders"))
def test_the_vector_scan_finds_the_batches_a_plain_loop_finds(topic: str) -> None:
    for log in sorted((FIXTURES / "folders" / f"{topic}-0").glob("*.log")):
        raw = log.read_bytes()
        table = scan_batches(raw)
        one_by_one = [head for head, _ in stored_batches(log.parent) if head.base_offset >= int(log.stem)]
        one_by_one = one_by_one[: len(table)]
        assert table.base_offset.tolist() == [head.base_offset for head in one_by_one]
        assert sum(head.size for head in one_by_one) == len(raw)
