"""Do the records of sound batches parse? And on the way: the records themselves, for whoever wants to judge them, too.

A right CRC says the bytes are as written, not that they make sense. Owns that check, and the hand-over of decoded
records to a `RecordTap`, so that an audit that looks at records as well reads and unpacks a log once. What the
records mean is not its business.

T1  a tap sees the records of a run that are below its end and not below its start, those of control batches left
    out, in order: what a reader of the partition would be given.
T2  a run that does not decode is `spoiled` to the tap: what it was given of it may be part of a batch.

Thread rule: pure but for the tap.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from tidegate.errors import CorruptError, InvalidError

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.log.verify.ranges import GatheredRun
    from tidegate.log.verify.scan import SoundRun

    CheckedRun: TypeAlias = SoundRun | GatheredRun

_LEAST: int = -(2**63)


class RecordTap(Protocol):
    """Somebody who wants the records: from offset `first` up to, not including, `end` (T1)."""

    first: int
    end: int

    def take(self, batch: pa.RecordBatch) -> None: ...
    def spoiled(self) -> None:
        """What it gets is not what a reader gets (T2); it may as well stop."""
        ...


class Unparsed(NamedTuple):
    """A batch whose records do not parse: where, and why."""

    position: int
    offset: int
    reason: str


def parse_records(run: SoundRun, path: Path, tap: RecordTap | None) -> list[Unparsed]:
    """Parse every record of the run; the batches that do not, by position in the file."""
    table = run.table
    whole = tap is not None and not table.is_control.any()
    if tap is not None and whole and len(table):
        whole = bool(int(table.base_offset.min()) >= tap.first and int(table.last_offset.max()) < tap.end)
    try:
        for piece in _pieces(run, path, control="include"):
            if tap is not None and whole:
                tap.take(piece)
        if tap is not None and not whole:
            for piece in _pieces(run, path, control="skip", from_offset=tap.first, to_offset=tap.end):
                tap.take(piece)
        return []
    except (CorruptError, InvalidError):
        if tap is not None:
            tap.spoiled()
        return _blamed(run)


def _pieces(run: SoundRun, path: Path, **wanted: Any) -> Any:
    from tidegate.log.format.decode import decode_pieces

    return decode_pieces(
        run.data,
        topic="",
        partition=0,
        check_crcs=False,
        path=path,
        file_position=run.position,
        **{"from_offset": _LEAST, **wanted},
    )


def _blamed(run: SoundRun) -> list[Unparsed]:
    from tidegate.log.format.decode import inspect_records

    found = []
    for position, size, offset in zip(
        run.table.position.tolist(), run.table.size.tolist(), run.table.base_offset.tolist(), strict=True
    ):
        try:
            inspect_records(run.data[position : position + size])
        except (CorruptError, InvalidError) as error:
            found.append(Unparsed(run.position + position, offset, str(error)))
    return found
