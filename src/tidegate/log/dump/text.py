"""Format the dump as text: each line exactly as Kafka's tool writes it, in two profiles.

| | modern (3.3 … 4.0) | seed (≤ 2.7) |
|---|---|---|
| first line of a log | `Log starting offset: n` | `Starting offset: n` |
| batch | `deleteHorizonMs: OptionalLong.empty`, `compresscodec: none` | neither word, `compresscodec: NONE` |
| record | `keySize: valueSize:` | `keysize: valuesize:` |
| snapshot | `OptionalLong[5]`, `lastTimestamp: t` | `Some(5)`, no last timestamp |
| message of magic 0, 1 | ` isValid: true crc: n}` (the brace is Kafka's) | ` crc: n isvalid: true` |

Record lines are formatted a window at a time: every field is one Arrow column of strings, the join of all columns
is one array, and the characters of that array are the text. A batch line precedes its first record.
Bytes are written unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import CorruptError
from tidegate.log.dump.decoders import RecordParser, compact_json
from tidegate.log.dump.dump import Control, DumpOptions, Findings, Target
from tidegate.log.dump.records import BatchRun, OddBatch, RecordColumns, java_text
from tidegate.log.format.batch import (
    CODEC_MASK,
    LOG_APPEND_TIME_BIT,
    MAX_SEQUENCE,
    NO_SEQUENCE,
    BatchHeader,
    Codec,
)

if TYPE_CHECKING:
    from numpy import bool_
    from numpy.typing import NDArray

    from tidegate.log.dump.records import LegacyRecord
    from tidegate.log.indexes import AbortedTxn, OffsetPosition, TimestampOffset
    from tidegate.log.producer_state import ProducerEntry


def record_lines(
    run: BatchRun,
    records: RecordColumns,
    batch_lines: Sequence[str],
    tails: Sequence[Any],
    *,
    size_words: tuple[str, str],
) -> str:
    """Return batch and record lines of a run; `tails` are columns that end each record's line."""
    headers: Any = "[]"
    if records.header_keys is not None:
        joined = pc.binary_join(records.header_keys, ",").cast(pa.large_string())
        headers = _join("[", joined, "]")
    return _joined(
        records,
        batch_lines,
        "| offset: ",
        _digits(records.offsets),
        " ",
        _labels(run, records),
        ": ",
        _digits(records.timestamps),
        f" {size_words[0]}: ",
        _digits(records.key_sizes),
        f" {size_words[1]}: ",
        _digits(records.value_sizes),
        " sequence: ",
        _digits(records.sequences),
        " headerKeys: ",
        headers,
        *tails,
    )


def bare_lines(records: RecordColumns, batch_lines: Sequence[str], tails: Sequence[Any]) -> str:
    """Return batch lines and, for each record, only its tails."""
    return _joined(records, batch_lines, *(tails or ("",)))


def contents(records: RecordColumns, parser: RecordParser | None) -> tuple[Any, Any]:
    """Return keys and values as columns of text, null where there is none to show."""
    if parser is None:
        return records.text_column("key"), records.text_column("value")
    pairs = [
        parser(*row)
        for row in zip(
            records.offsets.tolist(), records.bytes_of("key"), records.bytes_of("value"), strict=True
        )
    ]
    return (
        pa.array([pair[0] for pair in pairs], pa.large_string()),
        pa.array([pair[1] for pair in pairs], pa.large_string()),
    )


def labelled(label: str, column: Any) -> Any:
    """Return `label` and the text; empty where the text is null."""
    return pc.coalesce(_join(label, column), _word(""))


def column_of(texts: Mapping[int, str], length: int) -> Any:
    """Return a column of these texts, empty elsewhere."""
    empty = pa.array([""], pa.large_string()).take(pa.array(np.zeros(length, dtype=np.int64)))
    return replaced(empty, texts)


def replaced(column: Any, texts: Mapping[int, str]) -> Any:
    """Return the column with other texts at some rows."""
    if not texts:
        return column
    rows = np.zeros(len(column), dtype=bool)
    rows[list(texts)] = True
    ordered = [texts[row] for row in sorted(texts)]
    return pc.replace_with_mask(column, pa.array(rows), pa.array(ordered, pa.large_string()))


def _joined(records: RecordColumns, batch_lines: Sequence[str], *columns: Any) -> str:
    in_front, behind = _fronts(records, batch_lines)
    if len(records) == 0:
        return behind
    # Every line ends in a newline, so the array's characters are the text.
    lines = _join(in_front, *columns, "\n")
    offsets = np.frombuffer(lines.buffers()[1], dtype=np.int64)[lines.offset : lines.offset + len(lines) + 1]
    return str(lines.buffers()[2][offsets[0] : offsets[-1]], "utf-8") + behind


def _fronts(records: RecordColumns, batch_lines: Sequence[str]) -> tuple[Any, str]:
    """Return the text before each record's line, and the lines of batches after the last record."""
    fronts: dict[int, str] = {}
    behind = ""
    for start, line in zip(records.starts.tolist(), batch_lines, strict=False):
        if start < len(records):
            fronts[start] = fronts.get(start, "") + line + "\n"
        else:
            behind += line + "\n"
    return column_of(fronts, len(records)), behind


def _join(*columns: Any) -> Any:
    return pc.binary_join_element_wise(*(_word(c) if isinstance(c, str) else c for c in columns), _word(""))


def _word(text: str) -> Any:
    return pa.scalar(text, pa.large_string())


def _digits(column: Any) -> Any:
    return pc.cast(pa.array(column), pa.large_string())


def _labels(run: BatchRun, records: RecordColumns) -> Any:
    appended = (run.table.attributes & LOG_APPEND_TIME_BIT) != 0
    if not appended.any():
        return "CreateTime"
    counts = np.diff(records.starts)
    return pc.if_else(pa.array(np.repeat(appended, counts)), _word("LogAppendTime"), _word("CreateTime"))


_WORD = ("false", "true")


class TextSink:
    """Writes Kafka's text: data to `out`, mismatches to `err`."""

    def __init__(self, options: DumpOptions, out: TextIO, err: TextIO) -> None:
        self._options = options
        self._modern = options.profile == "modern"
        self._out = out
        self._err = err
        names = [codec.label if self._modern else codec.name for codec in Codec]
        self._codecs = [*names, *("?" for _ in range(8 - len(names)))]

    # -- .log ------------------------------------------------------------------------------------

    def begin(self, target: Target) -> None:
        self._out.write(f"Dumping {target.shown}\n")

    def unknown(self, target: Target) -> None:
        self._out.flush()
        self._err.write(f"Ignoring unknown file {target.shown}\n")

    def log_start(self, target: Target) -> None:
        if target.path.suffix == ".checkpoint":
            self._out.write(_checkpoint_line(target))
        elif self._modern:
            self._out.write(f"Log starting offset: {target.base_offset}\n")
        else:
            self._out.write(f"Starting offset: {target.base_offset}\n")

    def run(
        self,
        run: BatchRun,
        valid: NDArray[bool_],
        records: RecordColumns | None,
        controls: Mapping[int, Control],
    ) -> None:
        batches = self._batch_lines(run, valid)
        if records is None:
            self._write(batches)
        else:
            self._out.write(self._records(run, records, batches, controls))

    def _records(
        self, run: BatchRun, records: RecordColumns, batches: list[str], controls: Mapping[int, Control]
    ) -> str:

        bare = self._options.skip_record_metadata
        tails: list[Any] = []
        if self._options.shows_contents:
            keys, values = contents(records, self._options.parser)
            nothing = dict.fromkeys(controls, "")
            tails = [
                replaced(labelled("| key: " if bare else " key: ", keys), nothing),
                replaced(labelled(" payload: ", values), nothing),
            ]
        if bare:
            return bare_lines(records, batches, tails)
        if controls:
            said = {number: _control(control) for number, control in controls.items()}
            tails.append(column_of(said, len(records)))
        words = ("keySize", "valueSize") if self._modern else ("keysize", "valuesize")
        return record_lines(run, records, batches, tails, size_words=words)

    def _batch_lines(self, run: BatchRun, valid: NDArray[bool_]) -> list[str]:
        rows = run.table.rows
        columns = [[run.magic] * len(rows) if n == "magic" else rows[n].tolist() for n in BatchHeader._fields]
        positions = (run.table.position + run.position).tolist()
        return [
            self._batch_line(BatchHeader._make(fields), position, is_valid)
            for fields, position, is_valid in zip(
                zip(*columns, strict=True), positions, valid.tolist(), strict=True
            )
        ]

    def _batch_line(self, header: BatchHeader, position: int, is_valid: bool) -> str:
        last_offset = (header.last_offset + 2**63) % 2**64 - 2**63  # as Java's numbers wrap
        horizon = f" deleteHorizonMs: {_optional(header.delete_horizon_ms)}" if self._modern else ""
        return (
            f"baseOffset: {header.base_offset} lastOffset: {last_offset} count: {header.count} "
            f"baseSequence: {header.base_sequence} lastSequence: {_last_sequence(header)} "
            f"producerId: {header.producer_id} producerEpoch: {header.producer_epoch} "
            f"partitionLeaderEpoch: {header.leader_epoch} isTransactional: {_WORD[header.is_transactional]} "
            f"isControl: {_WORD[header.is_control]}{horizon} position: {position} "
            f"{header.timestamp_type.label}: {header.max_timestamp} size: {header.size} magic: {header.magic} "
            f"compresscodec: {self._codecs[header.attributes & CODEC_MASK]} crc: {header.crc} "
            f"isvalid: {_WORD[is_valid]}"
        )

    def odd(self, batch: OddBatch) -> None:
        self._write([self._batch_line(batch.header, batch.position, False)])

    def legacy(self, position: int, outer: LegacyRecord, inner: Sequence[LegacyRecord]) -> None:
        line = (
            f"offset: {outer.offset} position: {position} {outer.timestamp_label}: {outer.timestamp} "
            f"size: {outer.size} magic: {outer.magic} compresscodec: {self._codecs[outer.codec]} "
            f"crc: {outer.crc} isvalid: {_WORD[outer.is_valid]}"
        )
        self._write([line, *(self._legacy_record(outer, record) for record in inner)])

    def _legacy_record(self, outer: LegacyRecord, record: LegacyRecord) -> str:
        pair: tuple[str | None, str | None] = (None, None)
        if self._options.shows_contents:
            parser = self._options.parser
            pair = (
                (java_text(record.key), java_text(record.value))
                if parser is None
                else parser(record.offset, record.key, record.value)
            )
        if self._options.skip_record_metadata:
            return _tail(*pair, lead="|")
        sizes = (
            -1 if record.key is None else len(record.key),
            -1 if record.value is None else len(record.value),
        )
        start = f"| offset: {record.offset} {outer.timestamp_label}: {record.timestamp}"
        if self._modern:
            state = f" isValid: {_WORD[record.is_valid]} crc: {record.crc}}}"
            return f"{start} keySize: {sizes[0]} valueSize: {sizes[1]}{state}{_tail(*pair)}"
        state = f" crc: {record.crc} isvalid: {_WORD[record.is_valid]}"
        return f"{start} keysize: {sizes[0]} valuesize: {sizes[1]}{state}{_tail(*pair)}"

    def trailing(self, target: Target, count: int) -> None:
        self._out.write(f"Found {count} invalid bytes at the end of {target.name}\n")

    # -- the small files -------------------------------------------------------------------------

    def index_empty(self, target: Target) -> None:
        if self._modern:
            self._out.write(f"{target.shown} is empty.\n")

    def index_sane(self, target: Target) -> None:
        self._out.write(f"{target.shown} passed sanity check.\n")

    def offset_entries(self, entries: Sequence[OffsetPosition]) -> None:
        self._write([f"offset: {offset} position: {position}" for offset, position in entries])

    def time_entries(self, entries: Sequence[TimestampOffset]) -> None:
        self._write([f"timestamp: {timestamp} offset: {offset}" for timestamp, offset in entries])

    def aborted(self, entries: Sequence[AbortedTxn]) -> None:
        self._write(
            [
                f"version: 0 producerId: {entry.producer_id} firstOffset: {entry.first_offset} "
                f"lastOffset: {entry.last_offset} lastStableOffset: {entry.last_stable_offset}"
                for entry in entries
            ]
        )

    def producers(self, entries: Sequence[ProducerEntry]) -> None:
        self._write([self._producer_line(entry) for entry in entries])

    def _producer_line(self, entry: ProducerEntry) -> str:
        start = (
            f"producerId: {entry.producer_id} producerEpoch: {entry.epoch} "
            f"coordinatorEpoch: {entry.coordinator_epoch} "
        )
        if self._modern:
            start += f"currentTxnFirstOffset: {_optional(entry.txn_first_offset)} "
            start += f"lastTimestamp: {entry.last_timestamp} "
        else:
            open_at = "None" if entry.txn_first_offset is None else f"Some({entry.txn_first_offset})"
            start += f"currentTxnFirstOffset: {open_at} "
        if not entry.batches:
            return start
        batch = entry.batches[0]
        return start + (
            f"firstSequence: {batch.first_sequence} lastSequence: {batch.last_sequence} "
            f"lastOffset: {batch.last_offset} offsetDelta: {batch.offset_delta} timestamp: {batch.timestamp}"
        )

    # -- mismatches ------------------------------------------------------------------------------

    def snapshot_broken(self, target: Target, error: CorruptError) -> None:
        self._out.flush()
        self._err.write(f"{error}\n")

    def fault(self, target: Target, error: CorruptError) -> None:
        self._out.flush()
        self._err.write(f"error: {error}\n")

    def findings(self, findings: Findings) -> None:
        self._out.flush()
        write = self._err.write
        for path, pairs in findings.index_mismatches.items():
            write(f"Mismatches in :{path}\n")
            for index, log in reversed(pairs):
                write(f"  Index offset: {index}, log offset: {log}\n")
        for path, pairs in findings.time_mismatches.items():
            write(f"Found timestamp mismatch in :{path}\n")
            for index, log in pairs:
                write(f"  Index timestamp: {index}, log timestamp: {log}\n")
        for path, pairs in findings.time_disorder.items():
            write(f"Found out of order timestamp in :{path}\n")
            for index, previous in pairs:
                write(f"  Index timestamp: {index}, Previously indexed timestamp: {previous}\n")
        for pairs in findings.offsets_not_found.values():
            write("The following indexed offsets are not found in the log.\n")
            for index, log in pairs:
                write(f"Indexed offset: {index}, found log offset: {log}\n")
        for path, flat in findings.gaps.items():
            write(f"Non-consecutive offsets in {path}\n")
            for at in range(len(flat) - 2, -1, -2):
                write(f"  {flat[at]} is followed by {flat[at + 1]}\n")

    def _write(self, lines: list[str]) -> None:
        if lines:
            self._out.write("\n".join(lines) + "\n")


def _optional(value: int | None) -> str:
    return "OptionalLong.empty" if value is None else f"OptionalLong[{value}]"


def _last_sequence(header: BatchHeader) -> int:
    """Return the last sequence as Kafka computes it, also from a nonsensical sequence."""
    last = header.base_sequence + header.last_offset_delta
    if header.base_sequence == NO_SEQUENCE:
        return NO_SEQUENCE
    return last - 2**31 if last > MAX_SEQUENCE else last


def _tail(key: str | None, payload: str | None, lead: str = "") -> str:
    shown_key = "" if key is None else f"{lead} key: {key}"
    return shown_key if payload is None else f"{shown_key} payload: {payload}"


def _control(control: Control) -> str:
    if control.coordinator_epoch is not None:
        return f" endTxnMarker: {control.kind} coordinatorEpoch: {control.coordinator_epoch}"
    if control.message is not None:
        return f" {control.message[0]} {compact_json(control.message[1])}"
    return f" controlType: {control.kind}({control.type_id})"


def _checkpoint_line(target: Target) -> str:
    if target.name == "bootstrap.checkpoint":
        return "KRaft bootstrap snapshot\n"
    end, _, epoch = target.name.removesuffix(".checkpoint").partition("-")
    if not (end.isdigit() and epoch.isdigit()):
        raise CorruptError(f"{target.shown} is not named like a KRaft snapshot", path=target.path)
    return f"Snapshot end offset: {int(end)}, epoch: {int(epoch)}\n"
