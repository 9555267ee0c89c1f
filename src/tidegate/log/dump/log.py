"""Dumping a `.log` (or KRaft `.checkpoint`) file: batch by batch, record by record, in bounded memory.

Owns what is read of the file and in which order it reaches the sink. A whole window is decoded at once; only
when that fails are its batches taken one by one, so that everything before the malformed record is printed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.dump.batches import BatchRun, BatchWalk, LegacyMessage, OddBatch
from tidegate.log.dump.dump import MAX_INT, Control, DumpOptions, Findings, Target
from tidegate.log.dump.legacy import inner_records, read_message
from tidegate.log.dump.messages import CONTROL_RECORDS, read_versionless
from tidegate.log.dump.records import RecordColumns, read_records, readable_part
from tidegate.log.format.batch import CODEC_MASK, CONTROL_BIT, Codec, ControlType, parse_control

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tidegate.log.dump.dump import Sink

_CONTROL_KEY = Struct(">hh")


def dump_log(target: Target, options: DumpOptions, sink: Sink, findings: Findings, files: Files) -> None:
    """Print one log file; `CorruptError` where it cannot be read any further."""
    sink.log_start(target)
    with files.open(target.path) as file:
        size = file.size()
        walk = BatchWalk(file, 0, min(size, options.max_bytes))
        dumper = _LogDumper(target, options, sink, findings)
        for piece in walk:
            if isinstance(piece, BatchRun):
                dumper.run(piece)
            elif isinstance(piece, LegacyMessage):
                dumper.legacy(piece)
            else:
                dumper.odd(piece)
        if walk.position < size and options.max_bytes == MAX_INT:
            sink.trailing(target, size - walk.position)


@dataclass(slots=True)
class _LogDumper:
    target: Target
    options: DumpOptions
    sink: Sink
    findings: Findings
    last_offset: int = -1

    def run(self, run: BatchRun) -> None:
        from tidegate.log.format.decode import check_crcs

        _refuse_unknown_codec(run, self.target)
        valid = check_crcs(run.data, run.table)
        if not self.options.is_deep:
            self.sink.run(run, valid, None, {})
            return
        try:
            records = read_records(run, self.target.path)
            controls = _controls(run, records, self.target)
        except (CorruptError, InvalidError):  # InvalidError: unfolds to more than fits at once
            if len(run.table) == 1:
                self._as_far_as_possible(run, valid)
                raise
            for single in _singles(run):
                self.run(single)
            return
        self._note_gaps(records.offsets)
        self.sink.run(run, valid, records, controls)

    def _as_far_as_possible(self, run: BatchRun, valid: NDArray[np.bool_]) -> None:
        """Print a batch that cannot be decoded, and those of its records that lie before the malformed one."""
        try:
            part = readable_part(run)
            records = None if part is None else read_records(part, self.target.path)
            controls = {} if part is None or records is None else _controls(part, records, self.target)
        except (CorruptError, InvalidError):
            records, controls = None, {}
        if records is not None:
            self._note_gaps(records.offsets)
        self.sink.run(run, valid, records, controls)

    def legacy(self, message: LegacyMessage) -> None:
        outer = read_message(message.data, path=self.target.path, position=message.position)
        if not self.options.is_deep:
            self.sink.legacy(message.position, outer, ())
            return
        try:
            inner = inner_records(outer, path=self.target.path, position=message.position)
        except CorruptError:
            self.sink.legacy(message.position, outer, ())
            raise
        self._note_gaps([record.offset for record in inner])
        self.sink.legacy(message.position, outer, inner)

    def odd(self, batch: OddBatch) -> None:
        size = len(batch.data)
        self.sink.odd(batch)
        if self.options.is_deep:
            raise CorruptError(
                f"{self.target.shown}: the batch at position {batch.position} has {size} bytes, fewer than "
                f"its header, so its records cannot be read",
                path=self.target.path,
                position=batch.position,
                offset=batch.header.base_offset,
            )

    def _note_gaps(self, offsets: Sequence[int] | NDArray[np.int64]) -> None:
        """Remember where an offset does not follow the one before it."""
        import numpy as np

        if not len(offsets):
            return
        column = np.concatenate(([self.last_offset], np.asarray(offsets, dtype=np.int64)))
        broken = np.nonzero(column[1:] != column[:-1] + 1)[0]
        self.last_offset = int(column[-1])
        pairs = array("q")
        for index in broken.tolist():
            if column[index] != -1:  # nothing came before
                pairs.extend((int(column[index]), int(column[index + 1])))
        if pairs:
            self.findings.gaps.setdefault(self.target.absolute, array("q")).extend(pairs)


def _singles(run: BatchRun) -> list[BatchRun]:
    """The batches of a run, one run each."""
    from tidegate.log.format.decode import scan_batches

    singles = []
    for position, size in zip(run.table.position.tolist(), run.table.size.tolist(), strict=True):
        data = run.data[position : position + size]
        singles.append(BatchRun(run.position + position, data, scan_batches(data)))
    return singles


def _refuse_unknown_codec(run: BatchRun, target: Target) -> None:
    codes = run.table.attributes & CODEC_MASK
    if codes.max(initial=0) > Codec.ZSTD:
        index = int((codes > Codec.ZSTD).argmax())
        position = run.position + int(run.table.position[index])
        raise CorruptError(
            f"{target.shown}: the batch at position {position} has the unknown codec {codes[index]}",
            path=target.path,
            position=position,
            offset=int(run.table.base_offset[index]),
        )


def _controls(run: BatchRun, records: RecordColumns, target: Target) -> dict[int, Control]:
    """What the control records say, by record number."""
    batches = (run.table.attributes & CONTROL_BIT).nonzero()[0].tolist()
    if not batches:
        return {}
    keys, values = records.batch.column("key"), records.batch.column("value")
    controls = {}
    for batch in batches:
        for number in range(int(records.starts[batch]), int(records.starts[batch + 1])):
            try:
                controls[number] = read_control_record(keys[number].as_py(), values[number].as_py())
            except CorruptError as error:
                position = run.position + int(run.table.position[batch])
                raise CorruptError(
                    f"{target.shown}: the control batch at position {position}: {error}",
                    path=target.path,
                    position=position,
                    offset=int(records.offsets[number]),
                ) from None
    return controls


def read_control_record(key: bytes | None, value: bytes | None) -> Control:
    """A control record's key and value, as far as the dump shows them."""
    record = parse_control(key, value)
    _, type_id = _CONTROL_KEY.unpack_from(key or b"")
    if record.ends_transaction:
        return Control(record.kind.name, type_id, record.coordinator_epoch)
    if type_id in CONTROL_RECORDS and record.kind is not ControlType.UNKNOWN:
        name, schema = CONTROL_RECORDS[type_id]
        return Control(record.kind.name, type_id, message=(name, read_versionless(value or b"", schema, 0)))
    return Control(record.kind.name, type_id)
