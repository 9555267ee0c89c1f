"""Format the dump as one JSON object per line, whose `type` says what it is.

| type | of |
|---|---|
| `file` | every file, first: `file`, and for a log `base_offset` |
| `batch`, `record` | `.log`, `.checkpoint`; records with deep iteration, key and value with contents |
| `offset_index`, `time_index`, `aborted_transaction`, `producer` | the small files, one per entry |
| `trailing`, `sane`, `unknown_file`, `fault` | remarks about a file |
| `index_mismatch`, `timestamp_mismatch`, `timestamp_disorder`, `offset_not_found`, `offset_gap` | findings |

Bytes that are UTF-8 are strings, others `{"base64": …}`. Field names are stable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tidegate.errors import CorruptError
from tidegate.log.dump.dump import Control, DumpOptions, Findings, Target
from tidegate.log.dump.records import BatchRun, OddBatch, RecordColumns
from tidegate.log.format.batch import CODEC_MASK, CONTROL_BIT, DELETE_HORIZON_BIT, TRANSACTIONAL_BIT, Codec
from tidegate.log.format.json_records import text_or_base64

if TYPE_CHECKING:
    from numpy import bool_
    from numpy.typing import NDArray

    from tidegate.log.dump.records import LegacyRecord
    from tidegate.log.indexes import AbortedTxn, OffsetPosition, TimestampOffset
    from tidegate.log.producer_state import ProducerEntry

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_QUOTE = json.encoder.encode_basestring


class JsonSink:
    """Writes JSON lines."""

    def __init__(self, options: DumpOptions, out: TextIO) -> None:
        self._options = options
        self._out = out
        self._file = ""

    def begin(self, target: Target) -> None:
        self._file = target.shown
        fields: dict[str, Any] = {"type": "file", "file": target.shown}
        if target.path.suffix == ".log":
            fields["base_offset"] = target.base_offset
        self._write([fields])

    def unknown(self, target: Target) -> None:
        self._write([{"type": "unknown_file", "file": target.shown}])

    def log_start(self, target: Target) -> None:
        pass

    def run(
        self,
        run: BatchRun,
        valid: NDArray[bool_],
        records: RecordColumns | None,
        controls: Mapping[int, Control],
    ) -> None:
        batches = [_ENCODE(batch) for batch in self._batches(run, valid)]
        if records is None:
            self._out.write("\n".join(batches) + "\n")
            return
        rows = self._records(records, controls)
        starts = records.starts.tolist()
        woven: list[str] = []
        for number, batch in enumerate(batches):
            woven.append(batch)
            woven += rows[starts[number] : starts[number + 1]]
        self._out.write("\n".join(woven) + "\n")

    def _batches(self, run: BatchRun, valid: NDArray[bool_]) -> list[dict[str, Any]]:
        table = run.table
        columns: dict[str, NDArray[Any]] = {
            "base_offset": table.base_offset,
            "last_offset": table.last_offset,
            "count": table.count,
            "base_sequence": table.base_sequence,
            "producer_id": table.producer_id,
            "producer_epoch": table.producer_epoch,
            "leader_epoch": table.leader_epoch,
            "position": table.position + run.position,
            "size": table.size,
            "base_timestamp": table.base_timestamp,
            "max_timestamp": table.max_timestamp,
            "crc": table.crc,
            "is_valid": valid,
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [
            {"type": "batch", **dict(zip(columns, row, strict=True)), **_attributes(flags, row[9], run.magic)}
            for row, flags in zip(rows, table.attributes.tolist(), strict=True)
        ]

    def _records(self, records: RecordColumns, controls: Mapping[int, Control]) -> list[str]:
        """Return a line for each record, formatted without a dict for each, which would take four times as long."""
        header_keys = ["[]"] * len(records)
        if records.header_keys is not None:
            header_keys = [_ENCODE(keys) for keys in records.header_keys.to_pylist()]
        tails = self._contents(records) if self._options.shows_contents else [""] * len(records)
        for number, control in controls.items():
            tails[number] = f',"control":{_ENCODE(_control(control))}'
        return [
            f'{{"type":"record","offset":{offset},"timestamp":{timestamp},"key_size":{key},"value_size":{value},'
            f'"sequence":{sequence},"header_keys":{names}{tail}}}'
            for offset, timestamp, key, value, sequence, names, tail in zip(
                records.offsets.tolist(),
                records.timestamps.to_pylist(),
                records.key_sizes.to_pylist(),
                records.value_sizes.to_pylist(),
                records.sequences.tolist(),
                header_keys,
                tails,
                strict=True,
            )
        ]

    def _contents(self, records: RecordColumns) -> list[str]:
        keys, values = records.bytes_of("key"), records.bytes_of("value")
        parser = self._options.parser
        if parser is None:
            return [
                f',"key":{_json_text(key)},"value":{_json_text(value)}'
                for key, value in zip(keys, values, strict=True)
            ]
        return [
            ',"key":{},"value":{}'.format(*map(_ENCODE, parser(*row)))
            for row in zip(records.offsets.tolist(), keys, values, strict=True)
        ]

    def odd(self, batch: OddBatch) -> None:
        header = batch.header
        self._write(
            [
                {
                    "type": "batch",
                    "base_offset": header.base_offset,
                    "position": batch.position,
                    "size": header.size,
                    "magic": header.magic,
                    "crc": header.crc,
                    "is_valid": False,
                }
            ]
        )

    def legacy(self, position: int, outer: LegacyRecord, inner: Sequence[LegacyRecord]) -> None:
        batch = {
            "type": "batch",
            "last_offset": outer.offset,
            "position": position,
            "size": outer.size,
            "magic": outer.magic,
            "codec": outer.codec.label,
            "timestamp_type": outer.timestamp_label,
            "max_timestamp": outer.timestamp,
            "crc": outer.crc,
            "is_valid": outer.is_valid,
        }
        self._write([batch, *(self._legacy_record(record) for record in inner)])

    def _legacy_record(self, record: LegacyRecord) -> dict[str, Any]:
        row: dict[str, Any] = {
            "type": "record",
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key_size": -1 if record.key is None else len(record.key),
            "value_size": -1 if record.value is None else len(record.value),
            "crc": record.crc,
            "is_valid": record.is_valid,
        }
        if self._options.shows_contents:
            parser = self._options.parser
            row["key"], row["value"] = (
                (_text(record.key), _text(record.value))
                if parser is None
                else parser(record.offset, record.key, record.value)
            )
        return row

    def trailing(self, target: Target, count: int) -> None:
        self._write([{"type": "trailing", "file": target.shown, "bytes": count}])

    def index_empty(self, target: Target) -> None:
        pass

    def index_sane(self, target: Target) -> None:
        self._write([{"type": "sane", "file": target.shown}])

    def offset_entries(self, entries: Sequence[OffsetPosition]) -> None:
        self._write({"type": "offset_index", "offset": o, "position": p} for o, p in entries)

    def time_entries(self, entries: Sequence[TimestampOffset]) -> None:
        self._write({"type": "time_index", "timestamp": t, "offset": o} for t, o in entries)

    def aborted(self, entries: Sequence[AbortedTxn]) -> None:
        self._write({"type": "aborted_transaction", **entry._asdict()} for entry in entries)

    def producers(self, entries: Sequence[ProducerEntry]) -> None:
        self._write(_producer(entry) for entry in entries)

    def snapshot_broken(self, target: Target, error: CorruptError) -> None:
        self.fault(target, error)

    def fault(self, target: Target, error: CorruptError) -> None:
        self._write(
            [
                {
                    "type": "fault",
                    "file": target.shown,
                    "position": error.position,
                    "offset": error.offset,
                    "message": str(error),
                }
            ]
        )

    def findings(self, findings: Findings) -> None:
        kinds = (
            ("index_mismatch", findings.index_mismatches, "index_offset", "log_offset"),
            ("timestamp_mismatch", findings.time_mismatches, "index_timestamp", "log_timestamp"),
            ("timestamp_disorder", findings.time_disorder, "index_timestamp", "previous_timestamp"),
            ("offset_not_found", findings.offsets_not_found, "index_offset", "log_offset"),
        )
        for kind, by_file, first, second in kinds:
            for path, pairs in by_file.items():
                self._write({"type": kind, "file": path, first: one, second: two} for one, two in pairs)
        for path, flat in findings.gaps.items():
            self._write(
                {"type": "offset_gap", "file": path, "offset": flat[at], "next_offset": flat[at + 1]}
                for at in range(0, len(flat), 2)
            )

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "\n".join(_ENCODE(row) for row in rows)
        if text:
            self._out.write(text + "\n")


def _attributes(flags: int, base_timestamp: int, magic: int) -> dict[str, Any]:
    code = flags & CODEC_MASK
    return {
        "magic": magic,
        "codec": Codec(code).label,
        "timestamp_type": "LogAppendTime" if flags & 8 else "CreateTime",
        "is_transactional": bool(flags & TRANSACTIONAL_BIT),
        "is_control": bool(flags & CONTROL_BIT),
        "delete_horizon_ms": base_timestamp if flags & DELETE_HORIZON_BIT else None,
    }


def _control(control: Control) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": control.kind, "type_id": control.type_id}
    if control.coordinator_epoch is not None:
        fields["coordinator_epoch"] = control.coordinator_epoch
    if control.message is not None:
        fields["message"] = control.message[1]
    return fields


def _producer(entry: ProducerEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "type": "producer",
        "producer_id": entry.producer_id,
        "producer_epoch": entry.epoch,
        "coordinator_epoch": entry.coordinator_epoch,
        "txn_first_offset": entry.txn_first_offset,
        "last_timestamp": entry.last_timestamp,
    }
    if entry.batches:
        batch = entry.batches[0]
        row |= {
            "first_sequence": batch.first_sequence,
            "last_sequence": batch.last_sequence,
            "last_offset": batch.last_offset,
            "offset_delta": batch.offset_delta,
            "timestamp": batch.timestamp,
        }
    return row


def _text(value: bytes | None) -> Any:
    return None if value is None else text_or_base64(value)


def _json_text(value: bytes | None) -> str:
    """Return `_text` as JSON."""
    if value is None:
        return "null"
    try:
        return _QUOTE(value.decode("utf-8"))
    except UnicodeDecodeError:
        return _ENCODE(_text(value))
